"""Interfaces that a user implements (`Agent`, `Environment`, `RewardFunction`), and the plain data that processes
exchange.

Nothing here imports the rest of asyncrl, and nothing here imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from asyncrl.api.agent import (
    Agent,
    Environment,
    EpisodeError,
    EpisodeTimeout,
    GroupClient,
    Outcome,
    StepResult,
)
from asyncrl.api.chat import ChatClient, ChatFinish, ChatReply, Message, ToolCall, ToolSchema, messages_of
from asyncrl.api.generation import (
    Completion,
    FinishReason,
    GenerationClient,
    GenerationRequest,
    GenerationResult,
    Prompt,
    SamplingParams,
)
from asyncrl.api.reward import Episode, EpisodeReward, GroupReward, RewardFunction, RunIn, run_in, scored, verdict
from asyncrl.api.text import Tokenizer, answer_text, without_thoughts
from asyncrl.api.trajectory import Sample, SampleColumns, Trajectory, with_turn_rewards

if TYPE_CHECKING:
    from asyncrl.api.batch_agent import BatchAgent, BatchGroup
    from asyncrl.api.selection import BufferOrder, Curriculum, ReadyRollout
    from asyncrl.api.tool import Tool, ToolResult, as_tool

_ON_DEMAND = {
    "BatchAgent": "asyncrl.api.batch_agent",
    "BatchGroup": "asyncrl.api.batch_agent",
    "BufferOrder": "asyncrl.api.selection",
    "Curriculum": "asyncrl.api.selection",
    "ReadyRollout": "asyncrl.api.selection",
    "Tool": "asyncrl.api.tool",
    "ToolResult": "asyncrl.api.tool",
    "as_tool": "asyncrl.api.tool",
}
"""Names of what few runs use, with their modules, which are imported for whoever asks for the name."""


def __getattr__(name: str) -> Any:
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ON_DEMAND[name]), name)


__all__ = [
    "Agent",
    "BatchAgent",
    "BatchGroup",
    "BufferOrder",
    "ChatClient",
    "ChatFinish",
    "ChatReply",
    "Completion",
    "Curriculum",
    "Environment",
    "Episode",
    "EpisodeError",
    "EpisodeReward",
    "EpisodeTimeout",
    "FinishReason",
    "GenerationClient",
    "GenerationRequest",
    "GenerationResult",
    "GroupClient",
    "GroupReward",
    "Message",
    "Outcome",
    "Prompt",
    "ReadyRollout",
    "RewardFunction",
    "RunIn",
    "Sample",
    "SampleColumns",
    "SamplingParams",
    "StepResult",
    "Tokenizer",
    "Tool",
    "ToolCall",
    "ToolResult",
    "ToolSchema",
    "Trajectory",
    "answer_text",
    "as_tool",
    "messages_of",
    "run_in",
    "scored",
    "verdict",
    "with_turn_rewards",
    "without_thoughts",
]
