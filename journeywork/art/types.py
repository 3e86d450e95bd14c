"""Types of messages, of training configurations and of training results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

import pydantic
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from openai.types.chat.chat_completion import Choice
from pydantic_core import core_schema

# Messages are those of the client library and the agent. To build pydantic's schema of them takes 0.1 s at import.
_AS_IT_IS = pydantic.GetPydanticSchema(lambda _source, _handler: core_schema.any_schema())

Message: TypeAlias = Annotated[ChatCompletionMessageParam, _AS_IT_IS]
MessageOrChoice: TypeAlias = Annotated[ChatCompletionMessageParam | Choice, _AS_IT_IS]
Messages: TypeAlias = list[Message]
MessagesAndChoices: TypeAlias = list[MessageOrChoice]
"""A conversation. A `Choice` is a reply of the model that is trained, as the client library returned it. A dictionary
is a message that is not trained."""
Tools: TypeAlias = list[Annotated[ChatCompletionToolParam, _AS_IT_IS]]
MetadataValue: TypeAlias = float | int | str | bool | None
Verbosity: TypeAlias = Literal[0, 1, 2]


class TrainConfig(pydantic.BaseModel):
    """How a step is trained. A field that is not given is the installation's setting."""

    learning_rate: float = 5e-6
    kl_penalty_coef: float = 0.0
    grad_accumulation_sequences: int | None = pydantic.Field(default=None, ge=1)
    """Has no effect: the trainer plans its passes by itself (`trainer.memory`)."""


class TrainSFTConfig(pydantic.BaseModel):
    """How supervised fine-tuning is done. See `journeywork.art.TrainableModel.train_sft`."""

    learning_rate: float | list[float] = 5e-5
    batch_size: int | Literal["auto"] = "auto"


@dataclass
class TrainResult:
    """What a training step did."""

    step: int
    """Step of the newest served version."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class LocalTrainResult(TrainResult):
    """Result of `LocalBackend.train`."""

    checkpoint_path: str | None = None
    """Folder of the step's checkpoint."""


@dataclass
class ServerlessTrainResult(TrainResult):
    """Result of `RemoteBackend.train`."""

    artifact_name: str | None = None
    """Policy version of the step, such as `support@12`."""
