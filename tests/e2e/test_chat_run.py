"""A whole run of an agent that talks in messages, with a chat template, several turns and stop strings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

pytestmark = pytest.mark.slow

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
AGENT = """
from asyncrl.api import messages_of

TURNS = 3


async def run(prompt, env, client):
    messages = messages_of(prompt)
    for turn in range(TURNS):
        reply = await client.chat(messages)
        if reply.finish_reason == "length":
            break
        messages += [reply.message, {"role": "user", "content": "<|im_end|> Sure?"}]
    samples = client.samples(float(sum(character in "aeiou" for character in reply.content)))
    for sample in samples:  # what the trainer gets is in the samples, so the run fails where it is wrong
        assert sample.loss_mask.any() and not sample.loss_mask[: len(prompt.input_ids)].any()
    return samples
"""


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 with a token for each byte, and ChatML."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    folder = tmp_path_factory.mktemp("chat_model")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,  # so that a token out of its place would show in its log-probability
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(str(folder))
    return folder


def test_conversations_of_several_turns_are_trained(start_run: Any, chat_model: Path, tmp_path: Path) -> None:
    """The trainer's log-probabilities are the engine's, turn by turn, though random bytes are no text to tokenise."""
    (tmp_path / "talk.py").write_text(AGENT)
    rows = [{"prompt": f"What is {number} + 1?"} for number in range(40)]
    (tmp_path / "talk.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = start_run(
        model__path=chat_model,
        agent__path=f"{tmp_path / 'talk.py'}:run",
        dataset__path=tmp_path / "talk.jsonl",
        dataset__max_prompt_tokens=64,
        rollout__chat__max_turns=3,
        rollout__chat__drift="tolerant",
        rollout__sampling__max_new_tokens=48,
        rollout__sampling__stop="[a,e]",
        generation__max_total_tokens=8192,
        eval__interval=0,
        total_train_steps=3,
    )
    assert run.wait() == 0, run.output + run.logs()
    rows = run.rows()
    assert len(rows) == 3
    assert sum(row["chat/calls"] for row in rows) > 3
    assert sum(row["chat/drift_checks"] for row in rows) > 0
    assert all(abs(row["ppo/behave_kl"]) < 0.01 for row in rows)
    assert "<|im_start|>user" in run.output
