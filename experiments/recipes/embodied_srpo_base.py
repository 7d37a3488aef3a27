"""Make what the experiment `embodied_srpo` starts from: a tiny policy that sometimes succeeds, and a tiny V-JEPA 2.

    python experiments/recipes/embodied_srpo_base.py

The policy is a Qwen2-VL of 0.11 million parameters, cloned from somebody who knows on the training layouts, so briefly
that few held-out episodes succeed. The encoder is `VJEPA2Model` of transformers, trained by V-JEPA's own objective on
episodes of mixed skill, without labels: the latents of masked tubes, as a slow copy of the encoder has them, are
predicted from the others. Its record has what it is worth: the rank correlation of SRPO's reward with the true progress
over failures of other episodes, before and after this training. Both take seconds.
"""

from __future__ import annotations

import copy
import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F
from transformers import VJEPA2Config, VJEPA2Model
from vlm_shapes_base import UNKNOWN, make_tokenizer, make_untrained, write, write_record

from asyncrl.api.picture import Picture, evenly
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.config.plugin_code.import_paths import load_plugin
from asyncrl.models.picture_rules import PictureProcessor
from asyncrl.plugins.rewards.srpo import distances, spearman
from asyncrl.plugins.rewards.video_encoder import VJEPA2Encoder

CONFIG = load_experiment("embodied_srpo", [])
assert isinstance(CONFIG, ExperimentConfig)
TASK = CONFIG.env.path.rpartition(":")[0]
State, LAYOUTS, WORDS, MOVES, held_out = (
    load_plugin(f"{TASK}:{name}") for name in ("State", "LAYOUTS", "WORDS", "MOVES", "held_out")
)
INSTRUCTION, SIDE, CHUNK, SEED = load_plugin(f"{TASK}:INSTRUCTION"), 24, 2, 0
POLICY, ENCODER = Path(CONFIG.model.path or ""), Path(CONFIG.rewards[0].args["encoder_args"]["folder"])
CLONED_UNTIL, BATCH, RATE = 0.12, 64, 1e-3
FRAMES, ENCODER_STEPS, EPISODES = 8, 150, 200
VOCABULARY = [*WORDS, INSTRUCTION, "user", "assistant", "\n", UNKNOWN]


def layouts(split: str) -> list[Any]:
    """The first states of a split."""
    return [state for number, state in enumerate(LAYOUTS) if held_out(number) == (split == "held_out")]


class Policy:
    """A model's forward over states, as the experiment shows them."""

    def __init__(self, folder: Path, model: Any, tokenizer: Any) -> None:
        self.model, self._processor, self._seen = model, PictureProcessor.of(folder), dict[Any, Any]()
        parts = [{"type": "image"}, {"type": "text", "text": INSTRUCTION}]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        shown = text.replace(self._processor.marker, self._processor.text_of_size(SIDE, SIDE))
        self._prompt = tokenizer(shown)["input_ids"]
        self.words = torch.tensor(tokenizer.convert_tokens_to_ids(list(WORDS)))

    def logits(self, states: list[Any], chosen: torch.Tensor) -> torch.Tensor:
        """`[B, chosen + 1, words]` for `chosen` [B, n] of earlier words of the chunk."""
        for state in {*states} - self._seen.keys():
            picture = self._processor.images([Picture.from_array(state.frame).image()], return_tensors="pt")
            self._seen[state] = picture["pixel_values"], picture["image_grid_thw"]
        ids = torch.cat((torch.tensor(self._prompt).expand(len(states), -1), self.words[chosen]), 1)
        out = self.model(
            input_ids=ids,
            mm_token_type_ids=(ids == self._processor.token_id).long(),
            pixel_values=torch.cat([self._seen[state][0] for state in states]),
            image_grid_thw=torch.cat([self._seen[state][1] for state in states]),
            use_cache=False,
        )
        return out.logits[:, -chosen.shape[1] - 1 :, self.words].float()

    @torch.no_grad()
    def success(self, states: list[Any]) -> float:
        """Share of episodes from `states` that succeed, with the likeliest words."""
        for _ in range(MOVES // CHUNK):
            chosen = torch.zeros(len(states), 0, dtype=torch.long)
            for _ in range(CHUNK):
                chosen = torch.cat((chosen, self.logits(states, chosen)[:, -1:].argmax(-1)), 1)
            for turn in chosen.T.tolist():
                states = [s if s.done else s.after(WORDS[word]) for s, word in zip(states, turn, strict=True)]
        return sum(state.done for state in states) / len(states)


def demonstrations() -> list[tuple[Any, list[int]]]:
    """States of the training layouts on the best way, with the words of the next chunk."""
    found = []
    for start in layouts("train"):
        state = start
        while not state.done:
            before, chunk = state, []
            for _ in range(CHUNK):
                chunk.append(WORDS.index(state.best))
                state = state.after(state.best)
            found.append((before, chunk))
    return found


def make_policy(folder: Path) -> dict[str, Any]:
    """Clone until held-out episodes succeed now and then, and write the policy."""
    tokenizer = make_tokenizer(VOCABULARY)
    model = make_untrained(tokenizer)
    shutil.rmtree(folder, ignore_errors=True)
    write(folder, model, tokenizer, SIDE)
    policy, shown, draw = Policy(folder, model, tokenizer), demonstrations(), random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    for step in range(1, 1000):
        rows = draw.sample(shown, BATCH)
        chunks = torch.tensor([chunk for _, chunk in rows])
        logits = policy.logits([state for state, _ in rows], chunks[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), chunks.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 5 == 0:
            success = policy.success(layouts("held_out"))
            print(f"step {step}: loss {loss.item():.3f}, held-out success {success:.3f}", flush=True)
            if success >= CLONED_UNTIL:
                break
    write(folder, model, tokenizer, SIDE)
    return {"steps": step, "held_out_success": round(success, 4), "parameters": model.num_parameters()}


class Played(NamedTuple):
    """An episode: its frames, and the last state."""

    frames: list[Picture]
    last: Any


def episodes(seed: int = SEED) -> list[Played]:
    """Episodes on training layouts, of skills from none to all."""
    draw, played = random.Random(seed), []
    for state in draw.sample(layouts("train"), EPISODES):
        skill, frames = draw.random(), [Picture.from_array(state.frame)]
        while not state.done and len(frames) <= MOVES:
            state = state.after(state.best if draw.random() < skill else draw.choice(WORDS))
            frames.append(Picture.from_array(state.frame))
        played.append(Played(frames, state))
    return played


def progress_correlation(folder: Path, played: list[Played]) -> float:
    """Rank correlation of the failures' nearness to a success with their true progress, as the experiment embeds."""
    embedded = VJEPA2Encoder(folder=str(folder))([evenly(each.frames, FRAMES) for each in played])
    done = np.array([each.last.done for each in played])
    progress = np.array([each.last.progress for each in played])[~done]
    found = spearman(-distances(embedded[~done], embedded[done]), progress)
    assert found is not None, "some fail, and not all in the same way"
    return round(found, 3)


def untrained_encoder() -> VJEPA2Model:
    """V-JEPA 2 of 0.06 million parameters."""
    torch.manual_seed(SEED)
    own: dict[str, Any] = {
        "patch_size": 8,
        "crop_size": SIDE,
        "frames_per_clip": FRAMES,
        "tubelet_size": 2,
        "num_pooler_layers": 1,
    }
    encoder: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "mlp_ratio": 2.0}
    predictor = {f"pred_{name}": value for name, value in encoder.items()} | {"pred_hidden_size": 24}
    return VJEPA2Model(VJEPA2Config(**own, **encoder, **predictor, pred_num_mask_tokens=1))


def make_encoder(folder: Path) -> dict[str, Any]:
    """Train the encoder and write it."""
    model = untrained_encoder()
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    others = episodes(SEED + 1)
    untrained = progress_correlation(folder, others)
    show = VJEPA2Encoder(folder=str(folder))
    videos = torch.stack([show.video(evenly(each.frames, FRAMES)) for each in episodes()])
    slow, tubes = copy.deepcopy(model), FRAMES // 2 * (SIDE // 8) ** 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    draw = np.random.default_rng(SEED)
    for _ in range(ENCODER_STEPS):
        batch = videos[draw.integers(len(videos), size=16)]
        seen, hidden = torch.stack([torch.randperm(tubes) for _ in batch]).tensor_split(2, 1)
        out = model(pixel_values_videos=batch, context_mask=[seen], target_mask=[hidden]).predictor_output
        with torch.no_grad():
            target = slow.encoder(batch).last_hidden_state
            target = F.layer_norm(target, target.shape[-1:])
            target = target.gather(1, hidden[..., None].expand(-1, -1, target.shape[-1]))
        loss = (out.last_hidden_state - target).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(slow.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.02)
    model.save_pretrained(folder)
    return {
        "steps": ENCODER_STEPS,
        "loss": round(loss.item(), 4),
        "parameters": sum(each.numel() for each in model.encoder.parameters()),
        "progress_correlation": progress_correlation(folder, others),
        "progress_correlation_untrained": untrained,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for target, make in ((POLICY, make_policy), (ENCODER, make_encoder)):
        write_record(target, "embodied_srpo", make(target))
