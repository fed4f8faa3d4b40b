#!/usr/bin/env bash
# The recipe on one GPU, in calls of under ten minutes each: run_gpu.sh check|target|draft|all
# WORK holds everything in between, OUT what is kept (a few files under 16 MiB), TEACHER the stories15M checkpoint folder.
set -euo pipefail
cd "$(dirname "$0")/../.."
STAGE=${1:?check, target, draft or all}
WORK=${WORK:-/tmp/bundled} OUT=${OUT:-out} TEACHER=${TEACHER:-carry/stories15M} PYTHON=${PYTHON:-python3}
KEPT=${KEPT:-carry/bundled}            # files of an earlier call, for a machine that has forgotten them
LIMIT=${LIMIT:-570}                    # seconds this call may take
DEADLINE=$(($(date +%s) + LIMIT))
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=true HF_HUB_OFFLINE=1
mkdir -p "$WORK" "$OUT"
exec > >(tee -a "$OUT/log.txt") 2>&1
TEE=$!

step() { echo "== $(($(date +%s) - DEADLINE + LIMIT)) s: $*"; "$PYTHON" -m "runs.bundled.$@"; }

bring_back() {                         # also after a failure: whatever is finished is kept
    local status=$?
    trap - EXIT
    for name in target draft; do
        [ -d "$WORK/$name" ] && tar -C "$WORK" -cf - "$name" | split -b 14m - "$OUT/$name.tar."
    done
    [ -d "$WORK/facts" ] && (cd "$WORK" && tar -czf "$OUT/state.tar.gz" $(ls -d facts logs prompts.json manifest.json samples.md 2>/dev/null))
    [ -f "$WORK/heldout.jsonl" ] && head -n 2000 "$WORK/heldout.jsonl" | gzip >"$OUT/heldout.jsonl.gz"
    echo "== $(($(date +%s) - DEADLINE + LIMIT)) s: done, status $status"; ls -l "$OUT"
    exec >&- 2>&-
    wait "$TEE" || true                # or the last lines are lost
    exit "$status"
}

restore() {                            # the target, its facts and prompts, from an earlier call's files
    [ -f "$WORK/target/config.json" ] && [ -f "$WORK/prompts.json" ] && return
    echo "== $WORK has no target: unpacking $KEPT"
    cat "$KEPT"/target.tar.* | tar -C "$WORK" -xf -
    tar -C "$WORK" -xzf "$KEPT/state.tar.gz"
}

check() { step check --teacher "$TEACHER" ${CHECK_ARGS:-}; }
stories() {
    step sample_stories --work "$WORK" --teacher "$TEACHER" --seconds "${SAMPLE_SECONDS:-100}" ${SAMPLE_ARGS:-}
    step train_tokenizer --work "$WORK" ${TOKENIZER_ARGS:-}
}
target() { step train_target --work "$WORK" --deadline "$DEADLINE" --seconds "${TARGET_SECONDS:-220}" --reserve "${TARGET_RESERVE:-60}" ${TARGET_ARGS:-}; }
draft() {
    step distil_draft --work "$WORK" --deadline "$DEADLINE" --own-seconds "${OWN_SECONDS:-40}" --seconds "${DRAFT_SECONDS:-130}" ${DRAFT_ARGS:-}
    step finish --work "$WORK" ${FINISH_ARGS:-}
}

trap bring_back EXIT
case $STAGE in
    check) check ;;
    target) check && stories && target ;;
    draft) restore && draft ;;
    all) SAMPLE_SECONDS=${SAMPLE_SECONDS:-70} OWN_SECONDS=${OWN_SECONDS:-25} DRAFT_SECONDS=${DRAFT_SECONDS:-100}
        TARGET_SECONDS=${TARGET_SECONDS:-170} TARGET_RESERVE=${TARGET_RESERVE:-250}
        check && stories && target && draft ;;
    *) echo "unknown stage $STAGE"; exit 2 ;;
esac
