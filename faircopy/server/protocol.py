"""Bodies of requests and answers, in OpenAI's shape; the fields that OpenAI does not have are vLLM's or marked ours."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Whole = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Text = Annotated[str, Field(min_length=1)]


class Body(BaseModel):
    """A request's body: types are not converted, fields that are not known are left alone."""

    model_config = ConfigDict(strict=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def whole_numbers(cls, values: Any) -> Any:
        """1.0 is a whole number in JSON."""
        if not isinstance(values, dict):
            return values
        return {name: int(v) if isinstance(v, float) and v.is_integer() else v for name, v in values.items()}


class StreamOptions(Body):
    include_usage: bool | None = None


class Speculative(Body):
    """Ours: how this request is drafted. It changes how fast the answer comes and nothing else."""

    enabled: bool = True
    k: Annotated[int, Field(ge=0, le=64)] | None = Field(None, description="Draft tokens per step.")
    drafter: str | None = Field(None, description="The server's own if left out, or 'ngram'.")


class JsonSchema(Body):
    name: str = "answer"
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    regex: str | None = Field(None, description="Ours, with type 'regex'.")
    grammar: str | None = Field(None, description="Ours, with type 'grammar': a Lark grammar.")


class StructuredOutputs(Body):
    """vLLM's form of the same."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[Text] | None = Field(None, min_length=1)
    grammar: str | None = None


class Sampling(Body):
    """What completions and chat completions have in common."""

    model: str | None = Field(None, description="The served model's name; checked if given.")
    temperature: Annotated[float, Field(ge=0, le=1e4)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = Field(0, description="0 or -1: all tokens.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = Field(None, description="A fresh one if left out.")
    min_tokens: Whole | None = 0
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = False
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    logit_bias: dict[str, Annotated[float, Field(ge=-1e9, le=1e9)]] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e9)] | None = 1.0
    presence_penalty: Annotated[float, Field(ge=-1e9, le=1e9)] | None = 0.0
    frequency_penalty: Annotated[float, Field(ge=-1e9, le=1e9)] | None = 0.0
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
    timeout: Annotated[float, Field(gt=0, le=1e6)] | None = Field(None, description="Ours: seconds until it is ended.")


class CompletionRequest(Sampling):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    max_tokens: Whole | None = 16
    logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    echo: bool | None = False
    suffix: None = Field(None, description="Not served.")
    best_of: Annotated[int, Field(ge=1, le=128)] | None = Field(None, description="Served if it equals n.")


class TextPart(Body):
    type: Literal["text"]
    text: str


class FunctionCall(Body):
    name: str
    arguments: str = "{}"


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(Body):
    name: str = Field(min_length=1, max_length=64, pattern="^[A-Za-z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


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
    messages: list[Message] = Field(min_length=1)
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(Body):
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
