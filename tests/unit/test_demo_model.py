"""The embedded demo model: its folder, its vocabulary, and that what trained it computes what the real classes do."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from comfyui_pipedit.demo.captions import TEMPLATES, Subject, caption, caption_ids, token_ids
from comfyui_pipedit.demo.prompts import JUDGED
from comfyui_pipedit.demo.text_encoder import TextEncoder
from comfyui_pipedit.demo.words import EOS, MAX_TOKENS, PAD, SYNONYMS, UNK, vocabulary

DEMO = Path(__file__).parents[2] / "comfyui_pipedit" / "demo"
WEIGHTS = DEMO / "weights"
MIB = 1 << 20


def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(WEIGHTS / "tokenizer" / "tokenizer.json"))


def config(part: str) -> dict:
    return json.loads((WEIGHTS / part / "config.json").read_text())


def test_no_file_is_too_large_and_the_whole_is_small() -> None:
    sizes = [path.stat().st_size for path in WEIGHTS.rglob("*") if path.is_file()]
    assert max(sizes) <= 16 * MIB
    assert sum(sizes) <= 22 * MIB


def test_the_folder_is_that_of_a_wan_pipeline() -> None:
    index = json.loads((WEIGHTS / "model_index.json").read_text())
    assert index["transformer"] == ["diffusers", "WanTransformer3DModel"]
    transformer = config("transformer")
    assert (transformer["num_attention_heads"], transformer["attention_head_dim"]) == (8, 32)
    scheduler = json.loads((WEIGHTS / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler["flow_shift"] == 3.0
    assert scheduler["prediction_type"] == "flow_prediction"


def test_the_shards_hold_what_their_index_says_in_fp16() -> None:
    folder = WEIGHTS / "transformer"
    where = json.loads((folder / "diffusion_pytorch_model.safetensors.index.json").read_text())["weight_map"]
    for name in sorted(set(where.values())):
        with safe_open(folder / name, "pt") as shard:
            assert set(shard.keys()) == {key for key, file in where.items() if file == name}
            assert all(shard.get_tensor(key).dtype == torch.float16 for key in shard.keys())  # noqa: SIM118
            assert all(shard.get_tensor(key).isfinite().all() for key in shard.keys())  # noqa: SIM118


def test_the_tokenizer_has_the_vocabulary_and_knows_its_own_captions() -> None:
    words = tokenizer().get_vocab()
    assert sorted(words, key=words.__getitem__) == list(vocabulary())
    for prompt in JUDGED:
        encoded = tokenizer().encode(prompt.text)
        assert encoded.ids + [0] * (MAX_TOKENS - len(encoded.ids)) == token_ids(prompt.text)


def test_unknown_words_are_seen_and_case_and_punctuation_are_not() -> None:
    assert tokenizer().encode("A red Circle, moving.").tokens == ["a", "red", "circle", "moving", EOS]
    assert tokenizer().encode("a pink circle").tokens == ["a", UNK, "circle", EOS]
    assert tokenizer().encode("").tokens == [EOS]


def test_every_word_occurs_in_training_and_every_caption_fits() -> None:
    chance, seen, longest = random.Random(0), set(), 0
    for colour, speed, background in (("orange", "slowly", "gray"), ("red", "quickly", "navy"), ("red", "", "black")):
        for direction in ("up", "down", "left", "right"):
            for _ in range(60 * len(TEMPLATES)):
                words = caption(Subject(colour, "circle", direction, speed, background), chance).split()
                seen.update(words)
                longest = max(longest, len(words) + 1)
    assert longest <= MAX_TOKENS
    other = {"green", "blue", "yellow", "purple", "white", "cyan", "square", "triangle", PAD, EOS, UNK}
    assert seen == set(vocabulary()) - other
    assert set(SYNONYMS.values()) <= seen


def test_captions_say_what_is_shown() -> None:
    shown, chance = Subject("blue", "square", "left", "", "navy"), random.Random(1)
    captions = {caption(shown, chance) for _ in range(200)}
    assert "a blue square moving left on navy background" in captions
    assert "a blue square" in captions
    assert all("blue" in text and "square" in text and "right" not in text for text in captions)
    assert torch.equal(caption_ids([shown], 3, seed=4), caption_ids([shown], 3, seed=4))


def test_the_text_encoder_gives_zeros_behind_the_text_whatever_is_padded() -> None:
    torch.manual_seed(0)
    encoder = TextEncoder()
    with torch.no_grad():
        both = encoder(torch.tensor([token_ids("a red circle"), token_ids("")]))
        alone = encoder(torch.tensor([token_ids("")]))
    assert both[0, 4:].abs().max() == 0
    assert both[0, :4].abs().amin(1).min() > 0
    torch.testing.assert_close(both[1:], alone)


def test_the_text_encoder_is_transformers_umt5() -> None:
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    ours = TextEncoder().eval()
    ours.load_state_dict(load_file(WEIGHTS / "text_encoder" / "model.safetensors"))
    theirs = transformers.UMT5EncoderModel.from_pretrained(WEIGHTS / "text_encoder").eval()
    ids = torch.tensor([token_ids(JUDGED[0].text), token_ids("")])
    with torch.no_grad():
        expected = theirs(ids, (ids != 0).long()).last_hidden_state * (ids != 0)[..., None]
        torch.testing.assert_close(ours(ids), expected, atol=2e-5, rtol=0)
