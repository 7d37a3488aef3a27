"""What a user implements (`Agent`, `Environment`, `RewardFunction`) and the plain data that travels between processes.

Nothing here imports the rest of asyncrl, and nothing here imports torch.
"""

from asyncrl.api.agent import Agent
from asyncrl.api.buffer import BufferOrder, ReadyRollout
from asyncrl.api.chat import ChatClient, ChatFinish, ChatReply, Message, ToolCall, ToolSchema, messages_of
from asyncrl.api.environment import Environment, StepResult
from asyncrl.api.generation import (
    Completion,
    FinishReason,
    GenerationClient,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
)
from asyncrl.api.prompt import Prompt
from asyncrl.api.reward import Episode, EpisodeReward, GroupReward, RewardFunction, RunIn, run_in, scored, verdict
from asyncrl.api.tokenizer import Tokenizer
from asyncrl.api.trajectory import Sample, SampleColumns, Trajectory

__all__ = [
    "Agent",
    "BufferOrder",
    "ChatClient",
    "ChatFinish",
    "ChatReply",
    "Completion",
    "Environment",
    "Episode",
    "EpisodeReward",
    "FinishReason",
    "GenerationClient",
    "GenerationRequest",
    "GenerationResult",
    "GroupReward",
    "Message",
    "Prompt",
    "ReadyRollout",
    "RewardFunction",
    "RunIn",
    "Sample",
    "SampleColumns",
    "SamplingParams",
    "StepResult",
    "Tokenizer",
    "ToolCall",
    "ToolSchema",
    "Trajectory",
    "messages_of",
    "run_in",
    "scored",
    "verdict",
]
