"""k="auto": draft lengths from measured acceptance and measured cost, never slower than plain decoding for long.

The text does not depend on k, so a step of k draft tokens shows what every smaller k would have given: acceptance by
position is known downwards, and only going up has to be tried. What a step costs comes from a table measured once
(`costs.py`) and from the steps that run. A ledger compares every step with what plain decoding of the same batch would
have cost; one percent behind, k is 0 until the allowance has grown again.

Two estimates set a sequence's own length. Implicit: how often drafts were accepted, by position and by sequence.
Explicit: how sure the drafter is of a token, corrected by how often tokens of that confidence were accepted.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from faircopy.acceptance_rates import BINS, PRIOR_DRAFTS, UNSEEN, Acceptance, Rate, TreeGains, tree_gain
from faircopy.costs import GUESSED, REFERENCE, CostTable, StepCosts, bucket
from faircopy.draft_length import LADDER, DraftLengths, Room, own_room
from faircopy.ledger import PAYBACK, START, Ledger
from faircopy.measured_acceptance import History
from faircopy.plain_steps import PlainSteps
from faircopy.progress import counted
from faircopy.types import Confidence, Draft, FinishedStep, Sequence

BETTER = 1.02  # a change of k must promise this much
HOLD = 8  # steps a choice is kept
HOLD_OFF = 32  # the same while nothing is drafted, so that nothing is learned of drafts
MEASURED_EVERY = 8  # while drafting is off, one of this many steps is looked at: they are alike
PROBE = 256  # steps after which a drafter that looked worse is tried again,
SOON = 32  # at first, if its drafts were accepted; then twice as many each time
PLAIN = 6  # plain steps of a batch before drafting is tried in it, where costs are not known yet
TRIAL_K = 2  # draft tokens of a trial, and of the first drafts at all
TRIAL = 3  # its steps
LONGEST_TRIAL = 4  # the same of few sequences
CONFIDENT = 1  # sequences of a batch up to which quality "both" asks the drafter how sure it is
HOPELESS = 4  # drafts without an accepted token that end it
TRIED = 8  # sequences that get drafts in it
GOOD = 0.9  # acceptance of a good drafter
PROMISING = 0.15  # draft tokens accepted per sequence and step from which on drafts that a table forbids are tried
UNTRIED = 1.05  # times its estimated rate, of a length that no step of this size of batches has had
FILLED = 0.75  # share of a step's rows for prompts that are filled where sequences join
JOINING_FADE = 0.98  # of steps in which sequences join, with every step
PATIENCE = 64  # choices after which a trial that has not come about is given up


@dataclass(slots=True)
class JoiningPrompts:
    """How many rows of prompts captured steps read for each token that is written: longer drafts write more tokens in
    a step, and so end more texts."""

    rows: float = 0.0  # old ones fade
    tokens: float = 0.0

    def observe(self, step: FinishedStep) -> None:
        written = sum(len(decision.tokens) for decision in step.verdict.decisions)
        self.rows = JOINING_FADE * self.rows + step.prompts_read
        self.tokens = JOINING_FADE * self.tokens + written

    @property
    def per_token(self) -> float:
        return self.rows / self.tokens if self.tokens else 0.0


@dataclass(slots=True)
class Trial:
    """A few sequences get drafts, so that it is known what drafts bring; the others cost the drafter nothing."""

    seqs: frozenset[Sequence]
    length: int  # steps with drafts that it takes
    choices: int = 0
    steps: int = 0  # in which one of them had a draft
    drafts: int = 0
    accepted: int = 0  # draft tokens

    @property
    def over(self) -> bool:
        hopeless = self.drafts >= HOPELESS and not self.accepted
        done = self.steps >= self.length or self.choices > PATIENCE or all(seq.finished for seq in self.seqs)
        return hopeless or done

    def observe(self, step: FinishedStep) -> None:
        mine = [i for i, seq in enumerate(step.batch.seqs) if seq in self.seqs and step.draft.tokens[i]]
        found = [len(step.verdict.decisions[i].nodes) for i in mine]
        self.steps += bool(found)
        self.drafts, self.accepted = self.drafts + len(found), self.accepted + sum(found)


def new_trial(seqs: list[Sequence], k: int, most: int) -> Trial:
    """A trial with those of whose text the drafter has to read least, and which go on for a few steps. most: of them.

    Of a large batch only with those that come in now, if there are any, and for more steps if they are few: a draft
    head has the states of their prompts, and none of what was written while it was off.
    """
    lasting = [seq for seq in seqs if len(seq.tokens) + TRIAL * (k + 1) < seq.limit]
    newcomers = [seq for seq in lasting if not seq.output][:most]
    shortest = sorted(lasting, key=lambda seq: len(seq.output))[: min(most, TRIED)]
    chosen = frozenset((newcomers if len(seqs) > TRIED else []) or shortest or seqs[:most])
    return Trial(chosen, TRIAL if len(chosen) >= min(TRIED, len(seqs)) else LONGEST_TRIAL)


def best_path(parents: Seq[int]) -> list[int]:
    """Of a tree the nodes of a chain: from the root on each one's first child, which the drafter is surest of."""
    path, last = [], -1
    for node, parent in enumerate(parents):
        if parent == last:
            path.append(node)
            last = node
    return path


def _paid_length(step: FinishedStep) -> int:
    """The draft length that a step's time belongs to: what was asked for where rows were computed for all of it, as
    captured steps do; else the longest draft that was found."""
    asked, found = max(step.batch.max_nodes, default=0), max(map(len, step.draft.tokens), default=0)
    if step.batch.shared_k is not None:
        return step.batch.shared_k if step.captured or found else 0
    return asked if step.rows >= len(step.batch) * (asked + 1) else found


def _longest_is_asked_for(step: FinishedStep) -> bool:
    """Whether a request with a draft length of its own has the longest draft: the step's time is not what was chosen
    here."""
    nodes = [(room, seq.request.k is None) for seq, room in zip(step.batch.seqs, step.batch.max_nodes, strict=True)]
    return not max(nodes)[1]


class AutoLength(DraftLengths):
    """Chooses the number of draft tokens of each sequence, at most max_k."""

    def __init__(
        self,
        max_k: int,
        quality: str = "both",
        table: CostTable | None = None,
        room: Room = own_room,
        chains: int = 0,
        history: History | None = None,
    ) -> None:
        """quality: which estimate sets a sequence's own length, "implicit", "explicit", "both" or "off".

        room: nodes that one sequence may have, see DraftLengths.room.
        chains: drafts of at most this number of nodes are chains, if the drafter grows trees.
        history: what earlier runs have learned of the drafter; it counts as a few drafts.
        """
        self._max_k, self._quality, self._room, self._chains = max_k, quality, room, chains
        self._earlier = history
        self.acceptance, self._trees = Acceptance(), TreeGains()
        if history is not None:
            self.acceptance = Acceptance([*map(Rate.known, history.rates)], found=Rate.known(history.found))
            self._trees = TreeGains(dict(history.trees))
        self.use(GUESSED if table is None else table)
        self.lengths = tuple(k for k in LADDER if k <= max_k) + ((max_k,) if max_k not in LADDER else ())
        self.k = 0  # the present choice
        known = "" if history is None else f" but {counted(history.drafts, 'draft')} of earlier runs"
        self.reason = f"nothing is measured yet{known}"
        self._row_cost = 0.0  # tokens that a verified row costs in time
        self._token_cost = 0.0  # the same for a draft token: its row, and its share of the drafter's pass
        self._token_cost_alone = 0.0  # the same for a draft token that has the drafter's pass to itself
        self._choices = 0  # so far; the number of the one at which
        self._last_look = -HOLD_OFF  # rates were compared,
        self._last_drafts = 0  # drafts were wanted,
        self._last_trial, self._wait = 0, SOON  # a trial began,
        self.ledger, self._joining = Ledger(), JoiningPrompts()
        self._trial: Trial | None = None
        self._drafts = 0  # that were verified, by this engine
        self._first_asked: dict[tuple[int, int], int] = {}  # first steps without a table, by size of the batch and k
        self._checked: set[int] = set()  # sizes of batches for which it was decided whether to try what a table forbids
        self._grows_trees = False
        self._confident = False  # the drafter says how sure it is, and stops by itself
        self._batch = 1  # sequences of the last choice, those with a k of their own included

    def use(self, table: CostTable) -> None:
        """Costs were measured; what was learned with others is dropped."""
        self.costs = StepCosts(table)
        self._plain_steps = PlainSteps(self.costs)

    @property
    def brief(self) -> str:
        return counted(self.k, "draft token") if self.k else "drafting off"

    @property
    def off_for_long(self) -> bool:
        """In a large batch a trial takes newcomers, whose prompts are read with their states."""
        return self._batch > TRIED and self._off > HOLD_OFF and self._choices - self._last_trial < PROBE

    @property
    def _informed(self) -> bool:
        """Whether something is known of acceptance, from drafts of this engine or of earlier ones."""
        return self._drafts > 0 or self._earlier is not None

    @property
    def _has_trees(self) -> bool:
        """Whether long drafts are trees; before this engine has seen one, whether they were in earlier runs."""
        earlier = self._earlier is not None and not self._drafts and bool(self._earlier.trees)
        return self._grows_trees or earlier

    @property
    def _off(self) -> int:
        """Choices for which drafting has been off."""
        return self._choices - self._last_drafts

    @property
    def confidence(self) -> Confidence | None:
        """Up to which confidence tokens are wanted; None: all that were asked for."""
        if not self.k or not self._asks_confidence:
            return None
        plain = self._quality == "explicit"
        rates = [(n + 0.5) / BINS if plain else rate.value for n, rate in enumerate(self.acceptance.bins)]
        return Confidence(self._row_cost, self._token_cost, tuple(rates))

    @property
    def _asks_confidence(self) -> bool:
        """In a large batch a draft that stops saves rows and seldom a pass of the drafter: less than asking costs."""
        return self._quality == "explicit" or (self._quality == "both" and self._batch <= CONFIDENT)

    @property
    def history(self) -> History | None:
        tried = [rate.value for rate in self.acceptance.positions if rate.tries > PRIOR_DRAFTS]
        found = min(1.0, self.acceptance.found.value)
        drafts = self._drafts + (0 if self._earlier is None else self._earlier.drafts)
        return History(drafts, tuple(tried), self._trees.found, self._chains, found) if self._drafts else None

    def room(self, k: int, batch: int) -> int:
        return k and max(k, min(self._room(k, batch), self._max_k))

    def choose(self, seqs: Seq[Sequence]) -> list[int]:
        live = [seq for seq in seqs if seq.request.k is None]
        k = self._decide(live, len(seqs)) if live else 0
        if not k and len(live) == len(seqs):
            return [0] * len(seqs)
        return [self._own_length(seq, k) if seq.request.k is None else seq.request.k for seq in seqs]

    def observe(self, step: FinishedStep, seconds: float | None) -> None:
        """A step has finished; seconds: None if its time says nothing of decoding."""
        if seconds is not None and not self._measures(step):
            self.costs.count_unmeasured()
            self.ledger.book(0.0, seconds)
            return
        if step.captured:
            self._joining.observe(step)
        draft, batch, k = step.draft, len(step.batch), 0
        if any(step.batch.max_nodes):
            # in a step that reads a prompt, drafters may just read, too
            self._learn_drafts(step, asked=step.captured or seconds is not None)
            if self._trial is not None:
                self._trial.observe(step)
            if _longest_is_asked_for(step):
                return
            k = _paid_length(step)
        if seconds is not None:
            self._book(step, k, seconds)  # against what was expected before it ran
            self.costs.observe(batch, k, batch + sum(map(len, draft.tokens)), seconds)
        elif step.captured and self.costs.in_seconds:
            self._book(step, k, self.costs.of(batch, k))
            beside = self._beside_prompts(step, k)
            self.ledger.book(-beside, beside)
        elif not step.captured:
            self._book_reading(step)

    def _measures(self, step: FinishedStep) -> bool:
        """While drafting is off, steps are alike: one in MEASURED_EVERY is enough, but for those that are asked for."""
        if self._off <= HOLD_OFF or any(step.batch.max_nodes):
            return True
        return self._off % MEASURED_EVERY == 0 or self._plain_steps.pending(len(step.batch))

    def _book(self, step: FinishedStep, k: int, seconds: float) -> None:
        batch = len(step.batch)
        if not k or not batch or not self.costs.compared:
            self.ledger.book(0.0, seconds)
            return
        plain, expected = self.costs.plain_and_drafted(batch, k)
        tokens = sum(len(decision.tokens) for decision in step.verdict.decisions)
        self.ledger.drafted(seconds, expected, tokens * plain / batch, plain)

    def _beside_prompts(self, step: FinishedStep, k: int) -> float:
        """Seconds that a drafter costs beside prompts that a captured step reads: what it reads of them, and what its
        nodes' rows cost more there than in other steps."""
        if not step.prompt_rows or not k:
            return 0.0
        table, own = self.costs.table, step.rows - step.prompt_rows
        plain = own // (k + 1)
        beside = table.target(step.rows) - table.target(plain + step.prompt_rows)
        nodes = max(0.0, beside - (table.target(own) - table.target(plain)))
        return (nodes + table.reading_beside(step.read, len(step.batch))) * self.costs.level

    def _book_reading(self, step: FinishedStep) -> None:
        """A step that plain decoding makes too, to read prompts: what the drafter read meanwhile is its cost."""
        if self.costs.in_seconds:
            table, level = self.costs.table, self.costs.level
            read = table.reading(step.read) * level
            self.ledger.book(-read, table.target(step.rows) * level + read)

    def forget(self, seq: Sequence) -> None:
        self.acceptance.forget(seq)

    def _learn_drafts(self, step: FinishedStep, asked: bool) -> None:
        """asked: a sequence without a draft is one for which none was found."""
        draft, batch = step.draft, step.batch
        if batch.shared_k is not None:
            self._learn_shared(step)
        for i, (seq, decision) in enumerate(zip(batch.seqs, step.verdict.decisions, strict=True)):
            if batch.shares(i):
                continue
            if asked and batch.max_nodes[i] and decision.tokens:
                self.acceptance.found.add(bool(draft.tokens[i]))
            if draft.tokens[i]:
                self._learn(seq, draft, i, decision.nodes)
            elif not batch.max_nodes[i]:
                self.acceptance.pass_over(seq)

    def _learn_shared(self, step: FinishedStep) -> None:
        """A tree that got few of the nodes that all share was not likely to be right: their mean says more."""
        sharing = [i for i in range(len(step.batch)) if step.batch.shares(i)]
        nodes = sum(len(step.draft.tokens[i]) for i in sharing)
        for i in sharing if nodes else ():
            self._drafts, self._grows_trees = self._drafts + 1, True
            self._trees.observe(max(1, round(nodes / len(sharing))), len(step.verdict.decisions[i].nodes))

    def _learn(self, seq: Sequence, draft: Draft, i: int, accepted: list[int]) -> None:
        self._drafts += 1
        nodes = len(draft.tokens[i])
        if draft.is_chain(i) and (nodes <= self._chains or not self._grows_trees):
            sure = draft.confidence[i] if draft.confidence is not None else ()
            self._confident |= draft.confidence is not None
            self.acceptance.observe(seq, nodes, len(accepted), sure)
        else:
            self._grows_trees = True
            self._trees.observe(nodes, len(accepted))
            chain = best_path(draft.parents[i])  # what a chain would have given
            self.acceptance.observe(seq, len(chain), sum(node in accepted for node in chain))

    def _own_length(self, seq: Sequence, k: int) -> int:
        tried = self._trial is None or seq in self._trial.seqs
        return self._length(seq, k) if tried else 0

    def _length(self, seq: Sequence, k: int) -> int:
        """As many tokens as bring more than their rows cost; the drafter's confidence may stop it earlier.

        The longest draft of a batch decides how often the drafter runs, so few sequences go beyond the batch's k, and
        none where a pass of the drafter costs more than the one token that it can bring.
        """
        if not k or not self._token_cost or self._has_trees or self._quality == "off":
            return k
        reach = self._reach(seq, k)
        known = self._token_cost_alone < 1.0 and self.costs.known(self._batch, k)
        beyond = max(0, reach - k) // self._batch if known else 0
        return min(reach, k + beyond)

    def _reach(self, seq: Sequence, k: int) -> int:
        """How long this sequence's draft may be, were it alone."""
        if self._quality == "explicit":
            return self._max_k if self._confident else k
        survival = self.acceptance.survival(seq, self._max_k, found=1.0)  # where no draft is found, no row is paid
        paid = sum(alive >= self._row_cost for alive in survival[:k])  # of passes that the drafter makes anyway
        likely = paid + sum(alive >= self._token_cost for alive in survival[k:])
        return min(self._max_k, 2 * likely + 1) if self._confident and self._asks_confidence else likely

    def _decide(self, seqs: list[Sequence], batch: int) -> int:
        """The k of these sequences, in a batch of this size."""
        self._choices += 1
        if self.k or self._trial is not None:
            self._last_drafts = self._choices
        if self._stays_off(batch):
            return 0
        self._batch = batch
        if not self.costs.measured and self._still_measuring(batch):
            return self.k
        if self._trial is not None and not self._trial_is_over():
            return self.k
        if self.ledger.lost(self.costs.of(batch, 0), drafting=self.k > 0):
            self.k, self.reason = 0, "drafting is off: it has cost more than it brought"
            return 0
        if self._plain_steps.wanted(batch, self._choices):
            self._look_soon()
            self.reason = f"measuring plain decoding at batch {batch}"
            return 0
        if self._choices - self._last_look < HOLD:
            return self.k
        best, rate, present = self._best(seqs)
        self._last_look = self._choices
        self._wait = SOON if best and self.k else self._wait  # it has paid so far
        if best != self.k and rate > BETTER * present:
            if not self._informed and batch > TRIED:
                self._try(seqs, "trying whether drafts pay")
            elif self.k or self._invest(seqs, rate / present - 1.0):
                self.k = best
        if self.k == 0 and self._trial_is_due(seqs):
            self._try(seqs, "drafting is off; trying again whether it pays")
        elif self.k == 0 and self._table_is_untried(seqs):
            self._try(seqs, f"trying what drafts cost at batch {batch}")
        return self.k

    def _stays_off(self, batch: int) -> bool:
        """Whether drafting stays off without a look at costs: it was decided a moment ago, and no trial may come."""
        off = self.k == 0 and self._trial is None and not self.ledger.behind
        return off and batch == self._batch and self._choices - self._last_look < HOLD_OFF and self.costs.measured

    def _look_soon(self) -> None:
        """Compare rates at the next choice."""
        self._last_look = self._choices - HOLD_OFF

    def _table_is_untried(self, seqs: list[Sequence]) -> bool:
        """Whether only the table's costs forbid drafting: drafts are accepted, and no step of this size has had any.

        Once for each size. A table that was measured on a busy machine is wrong.
        """
        size = bucket(self._batch)
        tried = any(self.costs.tried(size, n) for n in range(1, self._max_k + 1))
        if tried or size in self._checked or not self._drafts:
            return False
        self._checked.add(size)
        return self._promises(seqs)

    def _invest(self, seqs: list[Sequence], gain: float) -> bool:
        """Whether reading all texts is paid back soon, and well before they end, by steps that gain this share; for as
        long it may be owed."""
        cost = self._reading(seqs)
        steps = sum(min(PAYBACK, (seq.limit - len(seq.tokens)) / 2) for seq in seqs) / len(seqs)
        pays = cost < steps * gain * self.costs.of(self._batch, 0)
        self.ledger.invest(cost if pays else 0.0)
        return pays

    def _reading(self, seqs: Collection[Sequence]) -> float:
        """Seconds in which a drafter that was off reads these texts."""
        return self.costs.table.reading(sum(len(seq.tokens) for seq in seqs)) * self.costs.level

    def _trial_is_due(self, seqs: list[Sequence]) -> bool:
        """Whether it has been off for long; in a small batch sooner, if drafts were accepted: then few measured steps
        speak against it.

        A drafter that was off has little to read of newcomers; after as long a time again that does not matter. If this
        engine has seen no drafts and good ones would pay, as soon as it is known what plain steps take, or a little
        later if earlier runs speak against it: their texts may have been others.
        """
        if not self._drafts and not self._last_trial and self._may_pay:
            confirmed = not self.costs.doubted(self._batch) or self._choices > PROBE
            return confirmed and (not self._informed or self._choices > SOON)
        wait = self._wait if self._batch <= TRIED and self._promises(seqs) else PROBE
        newcomers = any(len(seq.tokens) == len(seq.prompt) for seq in seqs)
        return self._choices - self._last_trial > (wait if newcomers else 2 * wait)

    @property
    def _may_pay(self) -> bool:
        """Whether drafts pay in this batch if nearly all of their tokens are right."""
        plain = BETTER * self._batch / self.costs.of(self._batch, 0)
        written = {k: self._batch * sum(GOOD**place for place in range(k + 1)) for k in self.lengths}
        return any(tokens > plain * self.costs.of(self._batch, k) for k, tokens in written.items())

    def _promises(self, seqs: list[Sequence]) -> bool:
        """Whether enough draft tokens are likely to be accepted, whatever they cost."""
        if not self._informed:
            return False
        k = min(TRIAL_K, self._max_k)
        return self._gain([self.acceptance.survival(seq, k) for seq in seqs], k) > PROMISING * len(seqs)

    def _try(self, seqs: list[Sequence], reason: str) -> None:
        """Begin a trial if what it costs may be lost: in captured steps of all newcomers, else of few or fewer."""
        batch = self._batch
        k = min(TRIAL_K if batch <= TRIED else 1, self._max_k)  # in a large batch the others' rows are paid for, too
        allowed = self.ledger.allowed(self.costs.of(batch, 0), 0 if self._drafts and batch > TRIED else START)
        for most in self._trial_sizes(batch):
            trial = new_trial(seqs, k, most)
            if self._reading_for(trial, seqs) + trial.length * self._dearer(batch, k, len(trial.seqs)) < allowed:
                self._wait = min(PROBE, 2 * self._wait)
                self.k, self._trial, self._last_trial = k, trial, self._choices
                self._row_cost = self._token_cost = 0.0
                self.reason = reason
                return

    def _trial_sizes(self, batch: int) -> tuple[int, ...]:
        """How many sequences a trial may have, in the order of preference."""
        if self.costs.table.steps:
            return batch, TRIED
        few = TRIED // 4
        return (few,) if self._informed and not self._drafts else (TRIED, TRIED // 2, few)

    def _reading_for(self, trial: Trial, seqs: list[Sequence]) -> float:
        """Seconds in which the drafter reads for a trial: its texts, and a token of each in every pass that the
        prompts of the whole batch take meanwhile."""
        table = self.costs.table
        passes = sum(len(seq.tokens) for seq in seqs if not seq.output) // table.target.largest
        return self._reading(trial.seqs) + passes * table.reading(len(trial.seqs)) * self.costs.level

    def _dearer(self, batch: int, k: int, drafted: int) -> float:
        """Seconds that a step with drafts for this many sequences takes beyond a plain one; by the table, if none was
        measured of late."""
        table, adds = self.costs.table, self.costs.table.adds(batch, k, drafted)
        if not self.costs.known(batch, k):
            return adds * self.costs.scale(batch)
        whole = table.adds(batch, k, batch)
        return (self.costs.of(batch, k) - self.costs.of(batch, 0)) * (adds / whole if whole else 1.0)

    def _trial_is_over(self) -> bool:
        assert self._trial is not None, "there is a trial"
        self._trial.choices += 1
        if self._trial.over:
            self.k, self._trial = 0, None
            self.costs.ask_again(self._batch)  # while drafting was off, few plain steps were looked at
            self._look_soon()
        return self._trial is None

    def _still_measuring(self, batch: int) -> bool:
        """Without a table, plain steps first and then a few with drafts show what they cost."""
        first = min(TRIAL_K, self._max_k)
        for k, steps, reason in (
            (0, PLAIN, "measuring plain decoding"),
            (first, TRIAL, f"trying {counted(first, 'draft token')}"),
        ):
            kind = bucket(batch), k
            if self.costs.tried(batch, k) < steps and self._first_asked.get(kind, 0) < PATIENCE:
                self._first_asked[kind] = self._first_asked.get(kind, 0) + 1
                self.k, self._last_look = k, self._choices
                self._row_cost = self._token_cost = 0.0
                self.reason = f"{reason} at batch {batch}"
                return True
        return False

    def _best(self, seqs: list[Sequence]) -> tuple[int, float, float]:
        """The best k, its tokens per second, and those of the present one."""
        batch = self._batch
        survivals = [self.acceptance.survival(seq, self._max_k, ahead=HOLD // 2) for seq in seqs]
        most = self._max_k if self._drafts else TRIAL_K
        lengths = [k for k in self.lengths if k <= most]
        rates = {k: self._rate(survivals, k) for k in lengths}
        raised = self._raised(rates)
        best = max(raised, key=raised.__getitem__)
        self._update_marginal_costs(batch, best, rates[best])
        self.reason = self._why(batch, best, rates)
        return best, raised[best], raised.get(self.k, rates[0])

    def _raised(self, rates: dict[int, float]) -> dict[int, float]:
        """The same rates, where drafts pay those of untried lengths raised by a little, so that they are tried: what
        they take is known from steps of other lengths alone.

        Where long drafts are trees, only lengths below the present one: trees have a factor of their own (TreeGains).
        """
        if not self.k:
            return rates
        most = self.k if self._chains or self._has_trees else self._max_k
        untried = {k for k in rates if 0 < k <= most and not self.costs.tried(self._batch, k)}
        return {k: rate * (UNTRIED if k in untried and rate > rates[0] else 1.0) for k, rate in rates.items()}

    def _rate(self, survivals: list[list[float]], k: int) -> float:
        """Tokens per second, while as many prompts are read beside them as of late: steps in which sequences join take
        longer, and may have fewer draft tokens."""
        batch = self._batch
        token = self._seconds(batch, k) / (batch + self._gain(survivals, k))
        rows = self._joining.per_token
        if rows:
            kinds = self.costs.joined(batch, k)
            beyond = [(kind, kind.seconds - token * (batch + self._gain(survivals, kind.k))) for kind in kinds]
            row = min((max(0.0, seconds) / (FILLED * kind.rows) for kind, seconds in beyond), default=0.0)
            token += rows * row
        return 1.0 / token

    def _seconds(self, batch: int, k: int) -> float:
        """What a step is likely to take: where no draft is found, as n-gram lookups often do not, nothing is paid."""
        found = min(1.0, self.acceptance.found.value)
        if not k or found == 1.0 or self.costs.table.captured(batch, k):
            return self.costs.of(batch, k)
        some = 1.0 - (1.0 - found) ** batch
        if not some:  # thousands of lookups in a row found nothing
            return self.costs.of(batch, 0)
        return (1.0 - some) * self.costs.of(batch, 0) + some * self.costs.of(batch, k, self._rows(batch, k))

    def _rows(self, batch: int, k: int) -> int:
        """Rows that a step with drafts is likely to have."""
        found = min(1.0, self.acceptance.found.value)
        some = 1.0 - (1.0 - found) ** batch
        return batch + (round(batch * k * found / some) if some else 0)

    def _gain(self, survivals: list[list[float]], k: int) -> float:
        """Draft tokens of all sequences that are likely to be accepted."""
        if self._has_trees and k > self._chains:
            return len(survivals) * self._trees.of(k)
        chain = min(k, self._chains or k)
        gain = sum(sum(survival[:chain]) for survival in survivals)
        return gain if chain == k else UNSEEN * tree_gain({chain: gain}, k)

    def _update_marginal_costs(self, batch: int, k: int, rate: float) -> None:
        """What one of k rows costs, and one more draft token, in tokens that could have been written meanwhile."""
        table = self.costs.table
        if not k or (table.steps and not self._has_trees):  # the rows of a captured step are paid for
            self._row_cost = self._token_cost = self._token_cost_alone = 0.0
            return
        rows = self._rows(batch, k)
        likely = self.costs.of(batch, k, rows)
        # over twice as many, for single measurements may be off
        beyond = (table.target(2 * rows) - table.target(rows)) / rows * self.costs.scale(batch)
        row = min(beyond, (likely - self.costs.of(batch, 0)) / max(1, rows - batch))  # no more than k cost on average
        drafting = self._drafting(batch, k, row)
        self._row_cost = max(0.01, min(0.8, rate * row))
        self._token_cost = max(0.02, min(0.9, rate * (beyond + drafting / batch)))
        self._token_cost_alone = rate * (beyond + drafting)

    def _drafting(self, batch: int, k: int, row: float) -> float:
        """Seconds of one pass of the drafter: by the table, or what measured steps take beyond plain ones and rows, if
        that is more: the table does not know the host's work around a pass."""
        table = self.costs.table
        expected = table.draft(batch) * self.costs.of(batch, k) / table.step(batch, k) if table.draft.points else 0.0
        if min(self.costs.tried(batch, k), self.costs.tried(batch, 0)) < REFERENCE:
            return expected
        return max(expected, (self.costs.of(batch, k) - self.costs.of(batch, 0)) / k - row * batch)

    def _why(self, batch: int, best: int, rates: dict[int, float]) -> str:
        if best:
            gain, shared = rates[best] / rates[0], self.room(best, batch) > best
            tokens = counted(best, "draft token") + (" per sequence, shared by the batch" if shared else "")
            return f"{tokens}: {gain:.2f} times plain decoding at batch {batch}"
        least = min((k for k in rates if k), default=0)
        dearer = 100.0 * (rates[0] / rates[least] - 1.0) if least else 0.0
        return f"drafting is off: at batch {batch} a drafted step costs {dearer:.0f} % more than it brings"
