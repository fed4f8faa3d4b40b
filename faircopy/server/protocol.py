"""Bodies of requests and answers, in OpenAI's shape; the fields that OpenAI does not have are vLLM's or marked ours."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError


def _whole(value: Any) -> Any:
    """1.0 is a whole number in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)  # behind the constraints, or openapi.json does not have them


def _only(value: bool) -> AfterValidator:
    def check(given: bool) -> bool:
        if given is not value:
            raise PydanticCustomError("only", "only {value} is served", {"value": str(value).lower()})
        return given

    return AfterValidator(check)


OnlyTrue = Annotated[bool, Field(json_schema_extra={"const": True}), _only(True)]
OnlyFalse = Annotated[bool, Field(json_schema_extra={"const": False}), _only(False)]

# Formats of openapi.json. The first two are completed with what the served model has (server/specification.py), the
# others name a language that a text must be written in.
TOKEN_ID, PROMPT = "token-id", "prompt"
REGEX, LARK, JSON_SCHEMA, JSON_OBJECT = "rust-regex", "lark", "json-schema", "json-object"

Whole = Annotated[int, Field(ge=0, lt=1 << 31), WHOLE]
Positive = Annotated[int, Field(ge=1, lt=1 << 31), WHOLE]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31, json_schema_extra={"format": TOKEN_ID}), WHOLE]
Text = Annotated[str, Field(min_length=1)]
Prompt = Annotated[str, Field(json_schema_extra={"format": PROMPT})]
Regex = Annotated[str, Field(json_schema_extra={"format": REGEX})]
Lark = Annotated[str, Field(json_schema_extra={"format": LARK})]
Schema = Annotated[dict[str, Any], Field(json_schema_extra={"format": JSON_SCHEMA})]


def _names_left_to_the_server(values: dict[str, Any]) -> dict[str, Any]:
    for name in sorted(values.keys() & TEMPLATE_ARGUMENTS):
        raise PydanticCustomError("reserved", "{name} is set by the server; leave it out", {"name": repr(name)})
    return values


# What the tokenizer's apply_chat_template is given by the server: the template itself above all, which is a program.
TEMPLATE_ARGUMENTS = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages"}
    | {"padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "tokenize"}
    | {"tokenizer_kwargs", "tools", "truncation"}
)
TemplateVariables = Annotated[
    dict[str, Any],
    Field(json_schema_extra={"propertyNames": {"not": {"enum": sorted(TEMPLATE_ARGUMENTS)}}}),
    AfterValidator(_names_left_to_the_server),
]
Ignored = Annotated[Any, Field(description="Accepted, without effect on the answer.")]
NotServed = Annotated[None, Field(description="Not served.")]


def _exactly_one(*names: str) -> dict[str, Any]:
    """What a schema says of fields of which one must be given."""
    nulls = dict.fromkeys(names, _NULL)
    return {"oneOf": [{"required": [name], "properties": {**nulls, name: {"not": _NULL}}} for name in names]}


_NULL: dict[str, Any] = {"type": "null"}
_FREE_FORMAT: dict[str, Any] = {
    "anyOf": [_NULL, {"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]}]
}
_MAY_END: dict[str, Any] = {"min_tokens": {"enum": [0, None]}, "ignore_eos": {"enum": [False, None]}}
# Text of a complete grammar must be able to end, and there is one grammar at most.
_ONE_GRAMMAR: dict[str, Any] = {
    "anyOf": [
        {"properties": {"response_format": _FREE_FORMAT, "structured_outputs": _NULL}},
        {"properties": {"structured_outputs": _NULL, **_MAY_END}},
        {"properties": {"response_format": _FREE_FORMAT, **_MAY_END}},
    ]
}
_ONLY_STREAMS_GO_ON: dict[str, Any] = {
    "anyOf": [
        {"properties": {"continued": _NULL}},
        {"properties": {"stream": {"const": True}, "seed": {"type": "integer"}}, "required": ["stream", "seed"]},
    ]
}
_CALLS_NEED_TOOLS: dict[str, Any] = {
    "anyOf": [
        {"properties": {"tool_choice": {"enum": ["none", "auto", None]}}},
        {"properties": {"tools": {"type": "array", "minItems": 1}, **_MAY_END}, "required": ["tools"]},
    ]
}


class Body(BaseModel):
    """A request's body: types are not converted, fields that are not known are refused."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def known_fields(cls, values: Any) -> Any:
        """A field that is not known is refused with the nearest known one as remedy."""
        if isinstance(values, dict):
            names = [field.alias or name for name, field in cls.model_fields.items()]
            for unknown in sorted(values.keys() - set(names)):
                near = difflib.get_close_matches(unknown, names, 1)
                hint = f"did you mean {near[0]!r}?" if near else "leave it out; /openapi.json lists the fields"
                raise PydanticCustomError("unknown_field", "unknown field; {hint}", {"field": unknown, "hint": hint})
        return values


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="vLLM's: the usage so far with every event.")
    include_obfuscation: Ignored = None


class Speculative(Body):
    """Ours: how this request is drafted. It changes how fast the answer comes and nothing else."""

    enabled: bool = True
    k: Annotated[int, Field(ge=0, le=64), WHOLE] | None = Field(None, description="Draft tokens per step.")
    drafter: str | None = Field(None, description="The server's own if left out, or 'ngram'.")


class JsonSchema(Body):
    name: str = "answer"
    description: str | None = None
    json_schema: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class PlainFormat(Body):
    type: Literal["text", "json_object"]


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class RegexFormat(Body):
    """Ours."""

    type: Literal["regex"]
    regex: Regex


class GrammarFormat(Body):
    """Ours."""

    type: Literal["grammar"]
    grammar: Lark


ResponseFormat = Annotated[PlainFormat | SchemaFormat | RegexFormat | GrammarFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """vLLM's form of the same; exactly one of the fields."""

    model_config = ConfigDict(json_schema_extra=_exactly_one("json", "regex", "choice", "grammar"))

    json_: Schema | Annotated[str, Field(json_schema_extra={"format": JSON_SCHEMA})] | None = Field(None, alias="json")
    regex: Regex | None = None
    choice: list[Text] | None = Field(None, min_length=1)
    grammar: Lark | None = None


class Written(Body):
    """What a client has already of a choice."""

    token_ids: list[TokenId]
    finished: bool = False


_OR_GREEDY: dict[str, Any] = {"anyOf": [{"const": 0}, {"minimum": 1e-4}]}
Temperature = Annotated[float, Field(ge=0, le=1e4, json_schema_extra=_OR_GREEDY)]
Bias = Annotated[float, Field(ge=-1e9, le=1e9)]


class Sampling(Body):
    """What completions and chat completions have in common."""

    model: str | None = Field(None, description="The served model's name; checked if given.")
    temperature: Temperature | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31), WHOLE] | None = Field(0, description="0 or -1: all tokens.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    seed: Annotated[int, WHOLE] | None = Field(None, description="Modulo 2 ** 63; a fresh one if left out.")
    min_tokens: Whole | None = 0
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = False
    n: Annotated[int, Field(ge=1, le=128), WHOLE] | None = 1
    logit_bias: dict[Annotated[str, Field(json_schema_extra={"format": TOKEN_ID})], Bias] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=1e9)] | None = 1.0
    presence_penalty: Bias | None = 0.0
    frequency_penalty: Bias | None = 0.0
    bad_words: list[Text] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = False
    return_origins: bool | None = Field(
        False, description="Ours: each piece of text, and whether a draft had it right."
    )
    speculative: bool | Speculative | None = Field(None, description="Ours: false switches drafts off.")
    timeout: Annotated[float, Field(ge=1e-3, le=1e6)] | None = Field(None, description="Ours: seconds at most.")
    continued: list[Written] | None = Field(
        None, description="Ours, for streams: what the client has of each choice; the stream goes on behind it."
    )
    # What OpenAI's and vLLM's clients send and what is not about the text, or what only its default is served of.
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    priority: Ignored = None
    request_id: Ignored = None
    spaces_between_special_tokens: Ignored = None
    skip_special_tokens: OnlyTrue | None = None
    include_stop_str_in_output: OnlyFalse | None = None
    use_beam_search: OnlyFalse | None = None


class CompletionRequest(Sampling):
    model_config = ConfigDict(json_schema_extra={"allOf": [_ONE_GRAMMAR, _ONLY_STREAMS_GO_ON]})

    prompt: (
        Prompt
        | Annotated[list[Prompt], Field(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    max_tokens: Whole | None = 16
    logprobs: Annotated[int, Field(ge=0, le=100), WHOLE] | None = None
    echo: bool | None = False
    suffix: NotServed = None
    best_of: Annotated[int, Field(ge=1, le=1), WHOLE] | None = Field(None, description="Use n.")


class TextPart(Body):
    type: Literal["text"]
    text: str
    cache_control: Ignored = None


class FunctionCall(Body):
    name: str
    arguments: Annotated[str, Field(json_schema_extra={"format": JSON_OBJECT})] = "{}"


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Ignored = None


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: Ignored = None
    annotations: Ignored = None
    audio: NotServed = None
    function_call: NotServed = None


IGNORED_IN_MESSAGES = {"refusal", "annotations", "audio", "function_call"}


class Function(Body):
    name: str = Field(min_length=1, max_length=64, pattern="^[A-Za-z0-9_.-]+$")
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = Field(None, description="A call that is forced has its schema in any case.")


class Tool(Body):
    type: Literal["function"]
    function: Function
    cache_control: Ignored = None


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class Prediction(Body):
    """The expected answer: it becomes this request's draft."""

    type: Literal["content"]
    content: str | list[TextPart]


class ChatRequest(Sampling):
    model_config = ConfigDict(json_schema_extra={"allOf": [_ONE_GRAMMAR, _ONLY_STREAMS_GO_ON, _CALLS_NEED_TOOLS]})

    messages: list[Message] = Field(min_length=1)
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=100), WHOLE] | None = Field(None, description="Implies logprobs.")
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    chat_template_kwargs: TemplateVariables | None = Field(None, description="Variables of the chat template.")
    reasoning_effort: str | None = Field(None, description="Passed on to the chat template.")
    add_generation_prompt: OnlyTrue | None = None
    continue_final_message: OnlyFalse | None = None
    modalities: list[Literal["text"]] | None = None
    audio: NotServed = None
    functions: NotServed = None
    function_call: NotServed = None
    web_search_options: NotServed = None


class TokenizeRequest(Body):
    """Exactly one of prompt and messages."""

    model_config = ConfigDict(json_schema_extra=_exactly_one("prompt", "messages"))

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[TokenId]


# Answers. They are sent as plain dictionaries; these classes are what openapi.json says about them.


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    prompt: str


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class State(BaseModel):
    status: str


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorDetail


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: dict[str, int] | None = None


class Answer(BaseModel):
    """What all answers have; `metrics.speculative_decoding` has vLLM's shape."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None = None
    metrics: dict[str, Any] | None = None


class CompletionChoice(BaseModel):
    index: int
    text: str
    finish_reason: str | None
    logprobs: dict[str, Any] | None = None
    seed: int
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    origins: list[tuple[str, bool]] | None = None


class CompletionAnswer(Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    finish_reason: str | None
    logprobs: dict[str, Any] | None = None
    seed: int
    token_ids: list[int] | None = None
    origins: list[tuple[str, bool]] | None = None


class ChatAnswer(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
