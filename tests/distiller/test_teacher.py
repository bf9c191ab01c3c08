from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from services.distiller.teacher import Teacher, match_heads, place_teacher, read_teacher
from services.shared.datasets.card import Head, HeadType
from services.shared.datasets.text import TextKind
from services.shared.jobs.planning.model_shapes import read_teacher as plan_reads
from services.shared.jobs.spec import Recipe
from services.shared.jobs.state import Reason
from services.shared.model.artifact import count_parameters, load_classifier, read_artifact
from services.shared.model.classifier import TAPPED
from services.shared.model.tokens import load_tokenizer, pad
from services.shared.training.job_setup import verify_models
from services.shared.training.process import RunFailed, World

RECIPE = Recipe.model_validate({"compute": "float32", "reduce": "float32"})
MOOD = Head(name="mood", labels=["bad", "good"])
IDS, MASK, _ = pad([[2, 9, 8, 7, 3], [2, 20, 3]], 0)


def placed(
    directory: Path, heads: list[Head], world: World, placement: str = "replicated"
) -> Teacher:
    files = read_teacher(directory, heads, text_kind=TextKind.SINGLE, max_length=48)
    return place_teacher(files, placement=placement, recipe=RECIPE, world=world)


@pytest.fixture
def published_decoder(teacher_dir: Path, tmp_path: Path) -> Path:
    config = Qwen3Config(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        id2label={0: "good", 1: "bad"},
    )
    model = Qwen3ForSequenceClassification(config)  # type: ignore[no-untyped-call]
    return publish(model, teacher_dir, tmp_path / "decoder")


@pytest.fixture
def published_encoder(teacher_dir: Path, tmp_path: Path) -> Path:
    config = BertConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        id2label={0: "good", 1: "bad"},
    )
    return publish(BertForSequenceClassification(config), teacher_dir, tmp_path / "encoder")


def publish(model: PreTrainedModel, teacher_dir: Path, directory: Path) -> Path:
    model.save_pretrained(directory)
    load_tokenizer(teacher_dir).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("placement", ["replicated", "sharded"])
def test_a_teacher_gives_the_logits_of_its_artifact(
    placement: str, teacher_dir: Path, world: World
) -> None:
    heads = read_artifact(teacher_dir).heads
    teacher = placed(teacher_dir, heads, world, placement)
    expected = load_classifier(teacher_dir)
    with torch.no_grad():
        logits = expected(IDS, MASK, tap=(2, 4))
    found = teacher(IDS, MASK, tap=(2, 4))
    assert teacher.placement == placement
    assert found.keys() == {"sentiment", "topics", TAPPED}
    for name, values in found.items():
        torch.testing.assert_close(values, logits[name], atol=1e-5, rtol=1e-5)


def test_a_small_teacher_is_replicated_automatically(teacher_dir: Path, world: World) -> None:
    teacher = placed(teacher_dir, read_artifact(teacher_dir).heads, world, "auto")
    assert teacher.placement == "replicated"


def test_a_teacher_too_large_for_a_rank_is_sharded_automatically(
    teacher_dir: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.distiller.teacher.REPLICATED_SHARE", 1e-9)
    teacher = placed(teacher_dir, read_artifact(teacher_dir).heads, world, "auto")
    assert teacher.placement == "sharded"


def test_no_parameter_of_a_teacher_requires_a_gradient(teacher_dir: Path, world: World) -> None:
    for placement in ("replicated", "sharded"):
        teacher = placed(teacher_dir, read_artifact(teacher_dir).heads, world, placement)
        assert not any(p.requires_grad for p in teacher.module.parameters())
        assert not teacher(IDS, MASK)["topics"].requires_grad


def test_a_teacher_with_more_heads_gives_those_of_the_student(
    teacher_dir: Path, world: World
) -> None:
    teacher = placed(teacher_dir, read_artifact(teacher_dir).heads[:1], world)
    assert teacher(IDS, MASK).keys() == {"sentiment"}


@pytest.mark.parametrize(
    "other",
    [
        Head(name="sentiment", labels=["bad", "fair", "good"]),
        Head(name="sentiment", labels=["bad", "good"], type=HeadType.MULTI_LABEL),
        Head(name="mood", labels=["bad", "good"]),
    ],
    ids=["labels", "type", "name"],
)
def test_heads_that_differ_are_refused_with_both_lists(other: Head, teacher_dir: Path) -> None:
    with pytest.raises(RunFailed) as failed:
        read_teacher(teacher_dir, [other], text_kind=TextKind.SINGLE, max_length=48)
    message = str(failed.value)
    assert failed.value.reason == "bad_spec"
    assert "the teacher has sentiment (single_label: bad, good), topics (multi_label" in message
    assert f"the student has {other.name} ({other.type}: {', '.join(other.labels)})" in message


def test_labels_in_another_order_are_matched_by_name() -> None:
    reordered = Head(name="mood", labels=["good", "bad"])
    assert match_heads([MOOD], [reordered]) == {"mood": [1, 0]}


def test_a_published_decoder_classifier_is_a_teacher(published_decoder: Path, world: World) -> None:
    model = Qwen3ForSequenceClassification.from_pretrained(published_decoder).train(mode=False)
    with torch.no_grad():
        expected = model(input_ids=IDS, attention_mask=MASK).logits
    for placement in ("replicated", "sharded"):
        found = placed(published_decoder, [MOOD], world, placement)(IDS, MASK)["mood"]
        torch.testing.assert_close(found, expected[:, [1, 0]], atol=1e-5, rtol=1e-5)


def test_a_published_encoder_classifier_is_a_teacher(published_encoder: Path, world: World) -> None:
    model = BertForSequenceClassification.from_pretrained(published_encoder).train(mode=False)
    with torch.no_grad():
        expected = model(input_ids=IDS, attention_mask=MASK).logits
    found = placed(published_encoder, [MOOD], world, "auto")(IDS, MASK)["mood"]
    torch.testing.assert_close(found, expected[:, [1, 0]], atol=1e-5, rtol=1e-5)


def test_a_published_encoder_cannot_be_sharded(published_encoder: Path, world: World) -> None:
    with pytest.raises(RunFailed, match='cannot be sharded; set it to "replicated"'):
        placed(published_encoder, [MOOD], world, "sharded")


def test_the_plan_reads_published_classifiers_and_whether_they_can_be_sharded(
    published_decoder: Path, published_encoder: Path, teacher_dir: Path
) -> None:
    expected = {published_decoder: False, published_encoder: True, teacher_dir: False}
    for directory, unshardable in expected.items():
        found = plan_reads(directory, classes=[2])
        assert found.unshardable is unshardable
        # Apart from the parameters of the head: a bias here, a pooler there.
        parameters = count_parameters(directory)
        assert found.shape.num_parameters == pytest.approx(parameters, rel=0.06)


def test_a_published_classifier_has_only_one_head(published_decoder: Path) -> None:
    other = Head(name="topic", labels=["a", "b"])
    with pytest.raises(RunFailed, match=r"the teacher has labels \(single_label: good, bad\)"):
        read_teacher(published_decoder, [MOOD, other], text_kind=TextKind.SINGLE, max_length=48)


def test_a_model_that_is_not_a_classifier_is_refused(published_decoder: Path) -> None:
    model = Qwen3ForSequenceClassification.from_pretrained(published_decoder).model
    model.save_pretrained(published_decoder)
    with pytest.raises(RunFailed, match=r"is not a classifier: it has no heads\.json") as failed:
        read_teacher(published_decoder, [MOOD], text_kind=TextKind.SINGLE, max_length=48)
    assert failed.value.reason == "bad_model"


def test_a_teacher_with_a_flipped_bit_is_refused_before_training(
    teacher_dir: Path, tmp_path: Path, world: World
) -> None:
    directory = tmp_path / "damaged"
    shutil.copytree(teacher_dir, directory)
    verify_models([None, directory], world)
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunFailed, match=r"model\.safetensors is not the file") as refusal:
        verify_models([None, directory], world)
    assert refusal.value.reason is Reason.BAD_MODEL
