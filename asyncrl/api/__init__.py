"""Interfaces that a user implements (`Agent`, `Environment`, `RewardFunction`), and the plain data that processes
exchange.

Nothing here imports the rest of asyncrl, and nothing here imports torch.
"""

from asyncrl.api.agent import Agent, EpisodeError, EpisodeTimeout, GroupClient, Outcome
from asyncrl.api.batch_agent import BatchAgent, BatchGroup
from asyncrl.api.buffer import BufferOrder, ReadyRollout
from asyncrl.api.chat import ChatClient, ChatFinish, ChatReply, Message, ToolCall, ToolSchema, messages_of
from asyncrl.api.curriculum import Curriculum
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
from asyncrl.api.thoughts import answer_text, without_thoughts
from asyncrl.api.tokenizer import Tokenizer
from asyncrl.api.tool import Tool, ToolResult, as_tool
from asyncrl.api.trajectory import Sample, SampleColumns, Trajectory, with_turn_rewards

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
