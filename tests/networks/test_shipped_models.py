"""Networks of transformers and torchvision, as their exporters write them, fine-tuned by the command line alone.

The packages are in no extra, as they are large: ``make shipped-models`` runs these tests in environments of their own.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from gradgraph.cli.app import run
from tests.kit.npz import npz
from tests.networks.exporters import (
    by_dynamo,
    by_dynamo_as_it_stands,
    by_optimum,
    by_torchscript,
    by_torchscript_in_training,
)

torch = pytest.importorskip("torch", reason="the networks are modules of PyTorch")
from benchmarks import torchvision_operators  # noqa: E402

torchvision_operators.declare()  # its wheels have operators for one build of PyTorch; the networks here need none
transformers = pytest.importorskip("transformers", reason="in no extra; `make shipped-models` runs these tests with it")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

Arrays = dict[str, np.ndarray]
Shell = Callable[[str], str]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """``shell("gradgraph train …")`` runs the command line in ``tmp_path`` and returns what stands on stdout."""
    monkeypatch.chdir(tmp_path)

    def call(line: str) -> str:
        capsys.readouterr()
        code = run(shlex.split(line)[1:])
        written = capsys.readouterr()
        assert code == 0, written.err
        return written.out

    return call


def like_trained(network: Any) -> Any:
    """The network, with no two weights alike: what begins as zeros or ones is merged by exporters."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return network.eval()


def in_onnxruntime(path: str | Path, arrays: Mapping[str, np.ndarray]) -> Arrays:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    fed = {i.name: arrays[i.name] for i in session.get_inputs()}
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, fed), strict=True))


def evaluated(shell: Shell, data: str) -> dict[str, float]:
    scores: dict[str, float] = json.loads(shell(f"gradgraph evaluate step --checkpoint run.ckpt --data {data} --json"))[
        "scores"
    ]
    return scores


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    """Classes lie on axis 1."""
    return float(torch.nn.functional.cross_entropy(torch.tensor(logits), torch.tensor(labels)))


# --- BERT and ViT -------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
         "num_labels": 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip


def bert() -> Any:
    config = transformers.BertConfig(vocab_size=99, max_position_embeddings=40, **SIZES)
    return transformers.BertForSequenceClassification(config)


def vit() -> Any:
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=32, patch_size=8, **SIZES))


def texts(rows: int, classes: int, seed: int) -> Arrays:
    """One of the first words tells the class; every third text is shorter."""
    rng = np.random.default_rng(seed)
    target = rng.integers(0, classes, rows)
    ids, mask = rng.integers(10, 99, (rows, 12)), np.ones((rows, 12), np.int64)
    ids[np.arange(rows), rng.integers(1, 3, rows)] = 3 + target
    mask[::3, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids), "target": target}


def images(rows: int, classes: int, seed: int) -> Arrays:
    """A bright quarter tells the class."""
    rng = np.random.default_rng(seed)
    target = rng.integers(0, classes, rows)
    pixels = rng.normal(0, 0.3, (rows, 3, 32, 32)).astype(np.float32)
    for image, label in zip(pixels, target, strict=True):
        image[:, 16 * (label // 2) :, 16 * (label % 2) :][:, :16, :16] += 1
    return {"pixel_values": pixels, "target": target}


NETWORKS = {"bert": (bert, texts), "vit": (vit, images)}
TASKS = {"bert": "text-classification", "vit": "image-classification"}
EXPORTERS = {"dynamo": by_dynamo, "torchscript": by_torchscript}


@pytest.fixture(scope="module", params=[(n, e) for n in NETWORKS for e in (*EXPORTERS, "optimum")], ids="-".join)
def written(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Callable[..., Arrays]]:
    """A classifier of three classes, the file that an exporter has written of it, and what draws its data."""
    name, exporter = request.param
    make, draw = NETWORKS[name]
    torch.manual_seed(0)
    network = like_trained(make())
    example = {key: torch.tensor(array) for key, array in draw(2, 3, 0).items() if key != "target"}
    folder = tmp_path_factory.mktemp(f"{name}-{exporter}")
    if exporter == "optimum":
        return network, by_optimum(network, TASKS[name], folder), draw
    return network, EXPORTERS[exporter](network, example, ["logits"], folder), draw


def test_a_new_head_and_all_below_it_train(written: tuple[Any, Path, Any], shell: Shell) -> None:
    _, path, draw = written
    np.savez("train.npz", **draw(96, 4, 0))
    held = draw(20, 4, 1)
    np.savez("held_out.npz", **held)
    shell(f"gradgraph surgery {path} --new-head 4 -o mine.onnx")
    shell("gradgraph train mine.onnx --data train.npz --train 'head.*' --lr 1e-2 --epochs 3 --export head.onnx")
    shell("gradgraph build head.onnx --lr 3e-3 --layer-decay 0.9 -o step")
    shell("gradgraph train step --data train.npz --epochs 20 --checkpoint run.ckpt --export trained.onnx")
    assert evaluated(shell, "train.npz")["loss"] < 0.1
    said = evaluated(shell, "held_out.npz")
    shell("gradgraph predict trained.onnx --data held_out.npz -o predicted.npz")
    logits = in_onnxruntime("trained.onnx", held)["logits"]
    assert logits.shape == (20, 4)
    np.testing.assert_allclose(npz("predicted.npz")["logits"], logits, atol=1e-5)
    assert said["loss"] == pytest.approx(cross_entropy(logits, held["target"]), rel=1e-4)


def test_a_step_is_that_of_pytorch(written: tuple[Any, Path, Any], shell: Shell) -> None:
    network, path, draw = written
    batch = draw(8, 3, 2)
    loss, after = one_step(shell, path, batch, "--loss cross_entropy")
    fed = {key: torch.tensor(array) for key, array in batch.items() if key != "target"}
    expected = torch.nn.functional.cross_entropy(network(**fed).logits, torch.tensor(batch["target"]))
    assert loss == pytest.approx(float(expected), rel=1e-4)
    assert_stepped(network, expected, weights_of(path), after)


def test_an_untrained_network_trains_as_itself(shell: Shell, tmp_path: Path) -> None:
    """Its zeros and ones are one tensor each in the file, and PyTorch's own again after ``--untie-merged``."""
    torch.manual_seed(0)
    network, batch = vit().eval(), images(8, 3, 2)
    path = by_torchscript(network, {"pixel_values": torch.tensor(batch["pixel_values"])}, ["logits"], tmp_path)
    assert "each train as one" in shell(f"gradgraph inspect {path} --json")
    shell(f"gradgraph surgery {path} --untie-merged -o apart.onnx")
    loss, after = one_step(shell, Path("apart.onnx"), batch, "--loss cross_entropy")
    logits = network(torch.tensor(batch["pixel_values"])).logits
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(batch["target"]))
    expected.backward()
    assert loss == pytest.approx(float(expected), rel=1e-4)
    for name, parameter in network.named_parameters():
        if name in after:
            moved = RATE * parameter.grad.numpy()
            np.testing.assert_allclose(after[name], parameter.detach().numpy() - moved, atol=1e-6, err_msg=name)
    assert sum(name in after for name, p in network.named_parameters() if p.ndim == 1) == sum(
        p.ndim == 1 for p in network.parameters()
    )


def test_a_decoder_learns_from_what_its_encoder_says(shell: Shell, tmp_path: Path) -> None:
    """T5, as optimum writes it: the states of the encoder's file are data, and the decoder's file trains."""
    config = transformers.T5Config(
        vocab_size=40,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    network = like_trained(transformers.T5ForConditionalGeneration(config))
    decoder = by_optimum(network, "text2text-generation", tmp_path)
    ids = np.random.default_rng(0).integers(3, 40, (16, 6))
    labels = ids[:, ::-1].copy()
    texts = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    np.savez("texts.npz", **texts)
    shell(f"gradgraph predict {decoder.with_name('encoder_model.onnx')} --data texts.npz -o states.npz")
    batch = {
        "input_ids": np.pad(labels[:, :-1], ((0, 0), (1, 0))), "encoder_attention_mask": texts["attention_mask"],
        "encoder_hidden_states": npz("states.npz")["last_hidden_state"], "target": labels,
    }  # fmt: skip
    before = weights_of(decoder)
    loss, after = one_step(shell, decoder, batch, "--loss cross_entropy --loss-option axis=-1")
    states = network.encoder(torch.tensor(ids)).last_hidden_state.detach()
    fed = {"decoder_input_ids": torch.tensor(batch["input_ids"]), "attention_mask": torch.ones(ids.shape)}
    logits = network(encoder_outputs=(states,), **fed).logits
    expected = torch.nn.functional.cross_entropy(logits.movedim(-1, 1), torch.tensor(labels))
    assert loss == pytest.approx(float(expected), rel=1e-4)
    assert_stepped(network.decoder.block, expected, before, after)
    shell(
        f"gradgraph train {decoder} --data batch.npz --loss-option axis=-1 --lr 1e-2 --epochs 60 --export trained.onnx"
    )
    assert (in_onnxruntime("trained.onnx", batch)["logits"].argmax(-1) == labels).mean() > 0.95


def test_labels_as_large_as_the_scores_of_segformer(shell: Shell, tmp_path: Path) -> None:
    """They are a quarter as high and wide as the picture, and optimum calls both by the same names."""
    config = transformers.SegformerConfig(
        hidden_sizes=[8, 16, 24, 32], depths=[1] * 4, num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16,
        num_labels=3,
    )  # fmt: skip
    network = like_trained(transformers.SegformerForSemanticSegmentation(config))
    path = by_optimum(network, "semantic-segmentation", tmp_path)
    rng = np.random.default_rng(0)
    batch = {
        "pixel_values": rng.normal(size=(4, 3, 64, 64)).astype(np.float32),
        "target": rng.integers(0, 3, (4, 16, 16)),
    }
    loss, _ = one_step(shell, path, batch, "--loss cross_entropy")
    logits = network(torch.tensor(batch["pixel_values"])).logits
    assert loss == pytest.approx(cross_entropy(logits.detach().numpy(), batch["target"]), rel=1e-4)
    assert in_onnxruntime("after.onnx", batch)["logits"].shape == (4, 3, 16, 16)


# --- one step beside PyTorch's ------------------------------------------------------------------------------


RATE = 0.1


def one_step(shell: Shell, path: Path, batch: Arrays, losses: str) -> tuple[float, Arrays]:
    """The loss of ``batch``, and the weights of the model that is exported after one step of SGD on it."""
    np.savez("batch.npz", **batch)
    rows = len(next(iter(batch.values())))
    rest = f"--batch-size {rows} --epochs 1 --optimizer sgd --lr {RATE} --export after.onnx --json"
    said = json.loads(shell(f"gradgraph train {path} --data batch.npz {losses} {rest}"))
    return said["history"]["loss"][0], weights_of("after.onnx")


def weights_of(path: str | Path) -> Arrays:
    return {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def assert_stepped(network: Any, loss: Any, before: Arrays, after: Arrays) -> None:
    """Each parameter of ``network`` stands in ``before``, perhaps transposed, and has gone where SGD takes it."""
    network.zero_grad()
    loss.backward()
    for name, parameter in network.named_parameters():
        old = parameter.detach().numpy()
        found = [(n, turned) for n, w in before.items() for turned in (old, old.T) if np.array_equal(w, turned)]
        assert found, f"{name} is not in the file"
        stored, turned = found[0]
        moved = RATE * parameter.grad.numpy()
        ours = after[stored] if turned is old else after[stored].T
        error = np.linalg.norm(old - ours - moved)
        assert error <= 1e-4 * np.linalg.norm(old), name
        assert error <= 1e-3 * np.linalg.norm(moved) + 1e-6, name


# --- a segmenter and a detector -----------------------------------------------------------------------------


def torchvision() -> Any:
    return pytest.importorskip("torchvision", reason="in no extra; `make shipped-models` runs these tests with it")


def segmenter() -> Any:
    """DeepLab over the lower half of a ResNet-18, with the auxiliary head that it is trained with."""
    torchvision()
    from torchvision.models import _utils, resnet18, segmentation
    from torchvision.models.segmentation.deeplabv3 import DeepLabHead
    from torchvision.models.segmentation.fcn import FCNHead

    trunk = resnet18(weights=None)
    layers = _utils.IntermediateLayerGetter(trunk, {"layer2": "out", "layer1": "aux"})
    return segmentation.DeepLabV3(layers, DeepLabHead(128, 3), FCNHead(64, 3))


def scenes(rows: int, seed: int) -> Arrays:
    """Pictures with one square each, red or green, and what each pixel shows."""
    rng = np.random.default_rng(seed)
    pixels = rng.normal(0, 0.3, (rows, 3, 64, 64)).astype(np.float32)
    labels = np.zeros((rows, 64, 64), np.int64)
    for i, (top, left) in enumerate(rng.integers(0, 40, (rows, 2))):
        kind = 1 + i % 2
        pixels[i, kind, top : top + 24, left : left + 24] += 2
        labels[i, top : top + 24, left : left + 24] = kind
    return {"image": pixels, "out_target": labels, "aux_target": labels}


KEEPING_NORMS = {"dynamo": by_dynamo_as_it_stands, "torchscript": by_torchscript_in_training}
SEGMENTS = "--loss out=cross_entropy --loss aux=cross_entropy:0.4"


@pytest.fixture(scope="module", params=KEEPING_NORMS)
def segmenting(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch.manual_seed(0)
    network = like_trained(segmenter())
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    folder = tmp_path_factory.mktemp(f"segmenter-{request.param}")
    example = {"image": torch.tensor(scenes(2, 0)["image"])}
    return network, KEEPING_NORMS[request.param](network, example, ["out", "aux"], folder)


def test_a_step_of_a_segmenter_is_that_of_pytorch(segmenting: tuple[Any, Path], shell: Shell) -> None:
    network, path = segmenting
    batch = scenes(4, 1)
    before = weights_of(path)
    loss, after = one_step(shell, path, batch, SEGMENTS)
    given, labels = network.train()(torch.tensor(batch["image"])), torch.tensor(batch["out_target"])
    expected = sum(
        share * torch.nn.functional.cross_entropy(given[name], labels) for name, share in (("out", 1.0), ("aux", 0.4))
    )
    assert loss == pytest.approx(float(expected), rel=1e-4)
    assert_stepped(network, expected, before, after)
    for name, statistic in network.named_buffers():
        if name.endswith("running_mean"):  # a variance divides by n in ONNX, by n - 1 in PyTorch
            np.testing.assert_allclose(after[name], statistic.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_segmenter_trains(segmenting: tuple[Any, Path], shell: Shell) -> None:
    _, path = segmenting
    np.savez("train.npz", **scenes(16, 0))
    held = scenes(5, 1)
    np.savez("held_out.npz", **held)
    shell(f"gradgraph build {path} {SEGMENTS} --lr 1e-3 -o step")
    shell(
        "gradgraph train step --data train.npz --batch-size 4 --epochs 15 --checkpoint run.ckpt --export trained.onnx"
    )
    said = evaluated(shell, "held_out.npz")
    shell("gradgraph predict trained.onnx --data held_out.npz -o predicted.npz")
    given = in_onnxruntime("trained.onnx", held)
    assert said["out_accuracy"] > 0.95
    for name in ("out", "aux"):
        np.testing.assert_allclose(npz("predicted.npz")[name], given[name], atol=1e-4)
        assert said[f"{name}_loss"] == pytest.approx(cross_entropy(given[name], held[f"{name}_target"]), rel=1e-3)


def detector() -> Any:
    """SSDLite with two classes beside the background."""
    torchvision()
    from torchvision.models.detection import ssdlite320_mobilenet_v3_large

    return ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3)


class Heads(torch.nn.Module):
    """A detector of torchvision up to its heads, without what chooses boxes."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.backbone, self.head = network.backbone, network.head

    def forward(self, image: Any) -> Any:
        found = self.head(list(self.backbone(image).values()))
        return found["bbox_regression"], found["cls_logits"]


def matched(network: Any, pixels: Any, boxes: Any, kinds: Any) -> Arrays:
    """What torchvision compares the heads with: for each anchor its class, and where the box lies from there."""
    from torchvision.models.detection.image_list import ImageList

    features = list(network.backbone(pixels).values())
    anchors = network.anchor_generator(ImageList(pixels, [tuple(pixels.shape[-2:])] * len(pixels)), features)
    classes, offsets = torch.zeros(len(pixels), len(anchors[0]), dtype=torch.long), []
    for i, own in enumerate(anchors):
        hit = network.proposal_matcher(torchvision().ops.box_iou(boxes[i : i + 1], own)) >= 0
        classes[i, hit] = kinds[i]
        offsets.append(network.box_coder.encode_single(boxes[i].expand_as(own), own))
    return {"boxes_target": torch.stack(offsets).numpy(), "classes_target": classes.numpy(),
            "boxes_mask": (classes > 0).numpy()}  # fmt: skip


def squares(network: Any, rows: int, seed: int) -> Arrays:
    """Pictures with one square each, and what a detector should say of them."""
    rng = np.random.default_rng(seed)
    pixels = rng.normal(0, 0.3, (rows, 3, 96, 96)).astype(np.float32)
    corners, kinds = rng.integers(0, 50, (rows, 2)), 1 + np.arange(rows) % 2
    for image, (top, left), kind in zip(pixels, corners, kinds, strict=True):
        image[kind, top : top + 40, left : left + 40] += 2
    boxes = np.concatenate([corners[:, ::-1], corners[:, ::-1] + 40], 1).astype(np.float32)
    with torch.no_grad():
        targets = matched(network, torch.tensor(pixels), torch.tensor(boxes), torch.tensor(kinds))
    return {"image": pixels, **targets}


DETECTS = "--loss boxes=smooth_l1 --loss classes=cross_entropy:2 --loss-option classes.axis=-1 --mask-of boxes:2"


@pytest.fixture(scope="module")
def detecting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch.manual_seed(0)
    network = like_trained(detector())
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 0.3  # 0.03 takes hundreds of steps to follow
    example = {"image": torch.randn(2, 3, 96, 96)}
    heads = Heads(network).eval()
    return network, by_dynamo_as_it_stands(heads, example, ["boxes", "classes"], tmp_path_factory.mktemp("detector"))


def test_the_losses_of_a_detector_are_those_of_pytorch(detecting: tuple[Any, Path], shell: Shell) -> None:
    network, path = detecting
    batch = squares(network, 6, 1)
    np.savez("batch.npz", **batch)
    shell(f"gradgraph build {path} {DETECTS} -o step")
    said = json.loads(shell("gradgraph evaluate step --untrained --data batch.npz --json"))["scores"]
    with torch.no_grad():
        boxes, classes = Heads(network).eval()(torch.tensor(batch["image"]))
    mask, given = torch.tensor(batch["boxes_mask"]), {k: torch.tensor(v) for k, v in batch.items()}
    assert 0 < int(mask.sum()) < mask.numel() / 4
    expected = torch.nn.functional.smooth_l1_loss(boxes[mask], given["boxes_target"][mask])
    assert said["boxes_loss"] == pytest.approx(float(expected), rel=1e-4)
    expected = torch.nn.functional.cross_entropy(classes.movedim(-1, 1), given["classes_target"])
    assert said["classes_loss"] == pytest.approx(float(expected), rel=1e-4)


def test_a_detector_trains(detecting: tuple[Any, Path], shell: Shell) -> None:
    network, path = detecting
    np.savez("train.npz", **squares(network, 24, 0))
    held = squares(network, 6, 1)
    np.savez("held_out.npz", **held)
    shell(f"gradgraph build {path} {DETECTS} --lr 2e-3 -o step")
    shell(
        "gradgraph train step --data train.npz --batch-size 8 --epochs 25 --checkpoint run.ckpt --export trained.onnx"
    )
    before = json.loads(shell("gradgraph evaluate step --untrained --data train.npz --json"))["scores"]
    said = evaluated(shell, "train.npz")
    assert said["boxes_loss"] < 0.5 * before["boxes_loss"] and said["classes_loss"] < 0.3 * before["classes_loss"]
    shell("gradgraph predict trained.onnx --data held_out.npz -o predicted.npz")
    given = in_onnxruntime("trained.onnx", held)
    for name in ("boxes", "classes"):
        np.testing.assert_allclose(npz("predicted.npz")[name], given[name], atol=1e-3)
    scores = cross_entropy(np.moveaxis(given["classes"], -1, 1), held["classes_target"])
    assert evaluated(shell, "held_out.npz")["classes_loss"] == pytest.approx(scores, rel=1e-3)
