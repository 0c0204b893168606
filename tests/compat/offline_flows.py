"""What users of onnxruntime.training write, run with it or with the drop-in: only ``ROOT`` differs.

``python tests/compat/offline_flows.py ROOT FOLDER [FLOW …]`` runs flows (all, if none is named) with the package
``ROOT``, keeps the artifacts in ``FOLDER``, and writes what was seen to ``FOLDER/seen.npz``. It needs numpy, onnx and
that package, and nothing of ours, so that it runs where onnxruntime-training does.
"""

import importlib
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
FLOWS = {}


class Training:
    """The modules of ``onnxruntime.training``, or of the drop-in."""

    def __init__(self, root):
        for name in ("artifacts", "onnxblock", "api"):
            setattr(self, name, importlib.import_module(f"{root}.{name}"))


def flow(function):
    FLOWS[function.__name__] = function
    return function


# --- models -------------------------------------------------------------------------------------------


def model(nodes, inputs, outputs, weights, opset=15):
    """A model of ``(operator, inputs, outputs, attributes)``; inputs and outputs are ``name: (type, shape)``."""
    info = [[helper.make_tensor_value_info(n, *t) for n, t in part.items()] for part in (inputs, outputs)]
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    made = [helper.make_node(op, i, o, name=f"{op}_{k}", **a) for k, (op, i, o, a) in enumerate(nodes)]
    graph = helper.make_graph(made, "net", *info, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def drawn(seed, **shapes):
    """Weights; a dot in a name is written ``__``."""
    rng = np.random.RandomState(seed)
    return {n.replace("__", "."): (rng.randn(*s) * 0.3).astype(np.float32) for n, s in shapes.items()}


def mlp(seed=0, outputs=5):
    nodes = [
        ("Gemm", ["input", "fc1.weight", "fc1.bias"], ["hidden"], {"transB": 1}),
        ("Relu", ["hidden"], ["active"], {}),
        ("Gemm", ["active", "fc2.weight", "fc2.bias"], ["output"], {"transB": 1}),
    ]
    weights = drawn(seed, fc1__weight=(8, 12), fc1__bias=(8,), fc2__weight=(outputs, 8), fc2__bias=(outputs,))
    return model(nodes, {"input": (FLOAT, ["batch", 12])}, {"output": (FLOAT, ["batch", outputs])}, weights)


MLP = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]


def cnn(training_mode, seed=3):
    nodes = [
        ("Conv", ["image", "conv.weight", "conv.bias"], ["conv"], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
        ("BatchNormalization", ["conv", "bn.weight", "bn.bias", "bn.mean", "bn.var"],
         ["normal", "new_mean", "new_var"] if training_mode else ["normal"], {"training_mode": training_mode}),
        ("Relu", ["normal"], ["active"], {}),
        ("MaxPool", ["active"], ["pooled"], {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("Flatten", ["pooled"], ["flat"], {"axis": 1}),
        ("Gemm", ["flat", "fc.weight", "fc.bias"], ["output"], {"transB": 1}),
    ]  # fmt: skip
    shapes = {"conv__weight": (4, 2, 3, 3), "conv__bias": (4,), "bn__weight": (4,), "bn__bias": (4,)}
    weights = drawn(seed, **shapes, fc__weight=(3, 64), fc__bias=(3,))
    weights["bn.weight"] += 1
    weights["bn.mean"], weights["bn.var"] = np.full(4, 0.1, np.float32), np.full(4, 1.5, np.float32)
    return model(nodes, {"image": (FLOAT, ["batch", 2, 8, 8])}, {"output": (FLOAT, ["batch", 3])}, weights)


def attention(seed=4):
    """Embedding, LayerNormalization, one head of attention, GELU as exporters write it; scores of each token."""
    nodes = [
        ("Gather", ["embed.weight", "tokens"], ["x"], {"axis": 0}),
        ("LayerNormalization", ["x", "norm.weight", "norm.bias"], ["n", "mean", "inv"], {"axis": -1}),
        ("MatMul", ["n", "q.weight"], ["q"], {}),
        ("MatMul", ["n", "k.weight"], ["k"], {}),
        ("MatMul", ["n", "v.weight"], ["v"], {}),
        ("Transpose", ["k"], ["kt"], {"perm": [0, 2, 1]}),
        ("MatMul", ["q", "kt"], ["s"], {}),
        ("Div", ["s", "root"], ["scaled"], {}),
        ("Softmax", ["scaled"], ["p"], {"axis": -1}),
        ("MatMul", ["p", "v"], ["a"], {}),
        ("Add", ["x", "a"], ["r"], {}),
        ("MatMul", ["r", "up.weight"], ["u0"], {}),
        ("Add", ["u0", "up.bias"], ["u"], {}),
        ("Div", ["u", "sqrt2"], ["g0"], {}),
        ("Erf", ["g0"], ["g1"], {}),
        ("Add", ["g1", "one"], ["g2"], {}),
        ("Mul", ["u", "g2"], ["g3"], {}),
        ("Mul", ["g3", "half"], ["g"], {}),
        ("MatMul", ["g", "down.weight"], ["logits3"], {}),
        ("Reshape", ["logits3", "flat"], ["output"], {}),
    ]
    shapes = {
        "embed__weight": (11, 6),
        "norm__weight": (6,),
        "norm__bias": (6,),
        "up__weight": (6, 9),
        "up__bias": (9,),
    }
    products = {"q__weight": (6, 6), "k__weight": (6, 6), "v__weight": (6, 6), "down__weight": (9, 7)}
    weights = drawn(seed, **shapes, **products)
    numbers = {"root": 6**0.5, "sqrt2": 2**0.5, "one": 1.0, "half": 0.5}
    weights.update({n: np.float32(x) for n, x in numbers.items()}, flat=np.array([-1, 7], np.int64))
    made = model(nodes, {"tokens": (INT64, ["batch", 5])}, {"output": (FLOAT, ["rows", 7])}, weights, 17)
    return made, [n for n in weights if "." in n]


def recurrent(seed=6):
    """An LSTM; halves of its last output change places."""
    nodes = [
        ("Transpose", ["series"], ["steps"], {"perm": [1, 0, 2]}),
        ("LSTM", ["steps", "lstm.w", "lstm.r", "lstm.b", "", "h0", "c0"], ["all", "last", "cell"], {"hidden_size": 8}),
        ("Squeeze", ["last", "first_axis"], ["state"], {}),
        ("Split", ["state", "halves"], ["left", "right"], {"axis": 1}),
        ("Concat", ["right", "left"], ["turned"], {"axis": 1}),
        ("Gemm", ["turned", "fc.weight", "fc.bias"], ["output"], {"transB": 1}),
    ]
    shapes = {"lstm__w": (1, 32, 6), "lstm__r": (1, 32, 8), "lstm__b": (1, 64), "fc__weight": (4, 8), "fc__bias": (4,)}
    weights = drawn(seed, **shapes)
    parameters = list(weights)
    weights.update(first_axis=np.array([0], np.int64), halves=np.array([4, 4], np.int64))
    weights.update(h0=np.zeros((1, 5, 8), np.float32), c0=np.zeros((1, 5, 8), np.float32))
    return model(nodes, {"series": (FLOAT, [5, 5, 6])}, {"output": (FLOAT, [5, 4])}, weights), parameters


# --- helpers ------------------------------------------------------------------------------------------


def opened(t, folder, checkpoint="checkpoint", prefix=""):
    state = t.api.CheckpointState.load_checkpoint(folder / checkpoint)
    paths = [folder / f"{prefix}{n}_model.onnx" for n in ("training", "eval", "optimizer")]
    module = t.api.Module(paths[0], state, paths[1])
    optimizer = t.api.Optimizer(paths[2], module) if paths[2].exists() else None
    return state, module, optimizer


def batches(seed, count, shape, classes=None, target=None, binary=False, tokens=None, even=False):
    rng = np.random.RandomState(seed)
    for i in range(count):
        rows = shape[0] - (not even and i % 4 == 3)  # every fourth batch is smaller, unless they are even
        x = (
            rng.randn(rows, *shape[1:]).astype(np.float32)
            if tokens is None
            else rng.randint(0, tokens, (rows, *shape[1:])).astype(np.int64)
        )
        if classes is not None:
            per_token = rows if tokens is None else rows * shape[1]
            yield x, rng.randint(0, classes, (per_token,)).astype(np.int64)
        else:
            y = rng.randn(rows, *target).astype(np.float32)
            yield x, (y > 0).astype(np.float32) if binary else y


def trained(state, module, optimizer, data, every=1):
    """The losses; weights move behind ``every`` batches."""
    losses = []
    module.train()
    for i, batch in enumerate(data, 1):
        found = module(*batch)
        losses.append((found[0] if isinstance(found, tuple) else found).item())
        if i % every == 0:
            optimizer.step()
            module.lazy_reset_grad()
    return np.array(losses)


def weights_of(state):
    return {f"weight:{name}": p.data for name, p in state.parameters}


def infer(module, path, outputs, feed):
    """What the exported model gives."""
    import onnxruntime

    module.export_model_for_inferencing(path, outputs)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    assert len(names) == 1, names
    return session.run(outputs, {names[0]: feed})


# --- flows --------------------------------------------------------------------------------------------


@flow
def offline_example(t, folder):
    """Artifacts with named loss and optimizer; train, evaluate, export."""
    t.artifacts.generate_artifacts(
        mlp(), optimizer=t.artifacts.OptimType.AdamW, loss=t.artifacts.LossType.CrossEntropyLoss,
        requires_grad=["fc1.weight", "fc2.weight", "fc2.bias"], frozen_params=["fc1.bias"],
        artifact_directory=folder, additional_output_names=["output"], nominal_checkpoint=True,
    )  # fmt: skip
    state, module, optimizer = opened(t, folder)
    losses = trained(state, module, optimizer, batches(1, 24, (6, 12), classes=5))
    module.eval()
    x, y = next(batches(2, 1, (6, 12), classes=5))
    loss, logits = module(x, y)
    (exported,) = infer(module, folder / "inference.onnx", ["output"], x)
    hidden = infer(module, folder / "inner.onnx", ["active", "output"], x)[0]
    flat = module.get_contiguous_parameters(False).numpy(), module.get_contiguous_parameters(True).numpy()
    names = [*module.input_names(), *module.output_names()[1:]]
    state.properties["epoch"], state.properties["best"], state.properties["tag"] = 3, 0.5, "mlp"
    t.api.CheckpointState.save_checkpoint(state, folder / "moments", include_optimizer_state=True)
    return {"losses": losses, "eval": loss, "logits": logits, "exported": exported, "hidden": hidden, "all": flat[0],
            "trainable": flat[1], "names": np.array(names), **weights_of(state)}  # fmt: skip


@flow
def resumed(t, folder):
    """Goes on from the checkpoint of the first flow, with the optimizer's moments."""
    before = folder.parent / "offline_example"
    state, module, optimizer = opened(t, before, "moments")
    optimizer.set_learning_rate(5e-3)
    losses = trained(state, module, optimizer, batches(5, 6, (6, 12), classes=5))
    properties = np.array([f"{name}={value}" for name, value in state.properties])
    return {"losses": losses, "properties": properties, **weights_of(state)}


@flow
def accumulated(t, folder):
    """SGD; gradients of three batches add up."""
    t.artifacts.generate_artifacts(
        mlp(1, 3), requires_grad=MLP, loss=t.artifacts.LossType.MSELoss, optimizer=t.artifacts.OptimType.SGD,
        artifact_directory=folder,
    )  # fmt: skip
    state, module, optimizer = opened(t, folder)
    optimizer.set_learning_rate(0.05)
    losses = trained(state, module, optimizer, batches(6, 14, (6, 12), target=(3,)), every=3)
    gradients = {f"gradient:{name}": p.grad for name, p in state.parameters}
    return {"losses": losses, **gradients, **weights_of(state)}


@flow
def clipped_and_decayed(t, folder):
    """The blocks of an optimizer with all its numbers; binary targets."""
    block = t.onnxblock.optim.AdamW(
        betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, clip_grad=t.onnxblock.optim.ClipGradNorm(0.05)
    )
    t.artifacts.generate_artifacts(
        mlp(2, 4), requires_grad=MLP, loss=t.artifacts.LossType.BCEWithLogitsLoss, optimizer=block,
        artifact_directory=folder, prefix="net_",
    )  # fmt: skip
    state, module, optimizer = opened(t, folder, "net_checkpoint", "net_")
    optimizer.set_learning_rate(0.02)
    losses = trained(state, module, optimizer, batches(7, 16, (6, 12), target=(4,), binary=True))
    gradients = {f"gradient:{name}": p.grad for name, p in state.parameters}
    return {"losses": losses, **gradients, **weights_of(state)}


@flow
def without_correction(t, folder):
    """AdamW as it is without bias correction; L1 loss; clipped SGD in a model of its own."""
    found = {}
    optimizers = {
        "plain": t.onnxblock.optim.AdamW(bias_correction=False),
        "clipped": t.onnxblock.optim.SGD(clip_grad=t.onnxblock.optim.ClipGradNorm(0.5)),
    }
    for name, block in optimizers.items():
        inside = folder / name
        inside.mkdir(exist_ok=True, parents=True)
        t.artifacts.generate_artifacts(
            mlp(3, 4), requires_grad=MLP, loss=t.artifacts.LossType.L1Loss, optimizer=block, artifact_directory=inside
        )
        state, module, optimizer = opened(t, inside)
        optimizer.set_learning_rate(0.01)
        losses = trained(state, module, optimizer, batches(8, 10, (6, 12), target=(4,)))
        found.update({f"{name}:losses": losses}, **{f"{name}:{k}": v for k, v in weights_of(state).items()})
    return found


@flow
def composed(t, folder):
    """A loss of blocks on two outputs, and models made block by block."""
    onnxblock = t.onnxblock

    class WeightedLoss(onnxblock.TrainingBlock):
        def __init__(self):
            super().__init__()
            self.first, self.second = onnxblock.loss.MSELoss(), onnxblock.loss.L1Loss(reduction="sum")
            self.weights = onnxblock.blocks.Constant(0.4), onnxblock.blocks.Constant(0.06)
            self.add, self.mul = onnxblock.blocks.Add(), onnxblock.blocks.Mul()

        def build(self, first, second):
            one = self.mul(self.weights[0](), self.first(first, target_name="first_target"))
            two = self.mul(self.weights[1](), self.second(second, target_name="second_target"))
            return self.add(one, two), first

    base = mlp(4, 3)
    base.graph.output.append(helper.make_tensor_value_info("active", FLOAT, ["batch", 8]))
    block = WeightedLoss()
    for name in MLP:
        block.requires_grad(name)
    block.requires_grad("fc1.bias", False)
    with onnxblock.base(base):
        block(*[o.name for o in base.graph.output])
        training, evaluation = block.to_model_proto()
    optimizer = onnxblock.optim.SGD()
    with onnxblock.empty_base():
        optimizer(block.parameters())
        updating = optimizer.to_model_proto()
    for name, proto in (("training", training), ("eval", evaluation), ("optimizer", updating)):
        onnx.save(proto, folder / f"{name}_model.onnx")
    onnxblock.save_checkpoint(block.parameters(), folder / "checkpoint")
    state, module, optimizer = opened(t, folder)
    optimizer.set_learning_rate(0.05)
    rng = np.random.RandomState(9)
    rows = [[rng.randn(6, n).astype(np.float32) for n in (12, 3, 8)] for _ in range(10)]
    losses = trained(state, module, optimizer, rows)
    onnxblock.load_checkpoint_to_model(folder / "checkpoint", base)
    return {"losses": losses, "base": numpy_helper.to_array(base.graph.initializer[0]), **weights_of(state)}


@flow
def own_loss(t, folder):
    """The model computes its loss: cross entropy of tokens, some of which do not count."""
    base, parameters = attention()

    class Loss(t.onnxblock.Block):
        def __init__(self):
            super().__init__()
            self.loss = t.onnxblock.loss.CrossEntropyLoss(ignore_index=2)

        def build(self, logits, *others):
            return self.loss(logits)

    t.artifacts.generate_artifacts(
        base, requires_grad=parameters, loss=Loss(), optimizer=t.artifacts.OptimType.AdamW, artifact_directory=folder
    )
    state, module, optimizer = opened(t, folder)
    optimizer.set_learning_rate(0.01)
    losses = trained(state, module, optimizer, batches(10, 16, (4, 5), classes=7, tokens=11))
    return {"losses": losses, **weights_of(state)}


@flow
def images(t, folder):
    """Convolution, BatchNormalization in training mode, MaxPool."""
    base = cnn(training_mode=1)
    parameters = [i.name for i in base.graph.initializer if i.name not in ("bn.mean", "bn.var")]
    t.artifacts.generate_artifacts(
        base, requires_grad=parameters, frozen_params=["bn.mean", "bn.var"],
        loss=t.artifacts.LossType.CrossEntropyLoss, optimizer=t.artifacts.OptimType.AdamW, artifact_directory=folder,
    )  # fmt: skip
    state = t.api.CheckpointState.load_checkpoint(folder / "checkpoint")
    # the eval model of onnxruntime-training does not load here: its BatchNormalization has three outputs
    module = t.api.Module(folder / "training_model.onnx", state)
    optimizer = t.api.Optimizer(folder / "optimizer_model.onnx", module)
    losses = trained(state, module, optimizer, batches(11, 12, (8, 2, 8, 8), classes=3))
    return {"losses": losses, **weights_of(state)}


@flow
def sequences(t, folder):
    """LSTM, Split and Concat."""
    base, parameters = recurrent()
    t.artifacts.generate_artifacts(
        base, requires_grad=parameters, loss=t.artifacts.LossType.CrossEntropyLoss,
        optimizer=t.artifacts.OptimType.AdamW, artifact_directory=folder,
    )  # fmt: skip
    state, module, optimizer = opened(t, folder)
    optimizer.set_learning_rate(0.01)
    losses = trained(state, module, optimizer, batches(17, 12, (5, 5, 6), classes=4, even=True))
    return {"losses": losses, **weights_of(state)}


@flow
def last_layer(t, folder):
    """Transfer learning: everything but the last layer is frozen, all numbers of formulas with it."""
    base, _ = attention(5)
    parameters = ["down.weight"]
    others = [i.name for i in base.graph.initializer if i.name not in parameters]
    t.artifacts.generate_artifacts(
        base, requires_grad=parameters, frozen_params=others,
        loss=t.artifacts.LossType.CrossEntropyLoss, optimizer=t.artifacts.OptimType.AdamW, artifact_directory=folder,
    )  # fmt: skip
    state, module, optimizer = opened(t, folder)
    losses = trained(state, module, optimizer, batches(12, 8, (4, 5), classes=7, tokens=11))
    module.eval()
    evaluated = module(*next(batches(13, 1, (4, 5), classes=7, tokens=11)))
    return {"losses": losses, "eval": evaluated, **weights_of(state)}


@flow
def federated(t, folder):
    """Two devices train from one nominal checkpoint; their parameters are averaged as vectors."""
    before = folder.parent / "offline_example"
    server, whole, _ = opened(t, before)
    flat = whole.get_contiguous_parameters(False)
    found = []
    for seed in (14, 15):
        state, module, _ = opened(t, before, "nominal_checkpoint")
        module.copy_buffer_to_parameters(flat, False)
        optimizer = t.api.Optimizer(before / "optimizer_model.onnx", module)
        losses = trained(state, module, optimizer, batches(seed, 4, (6, 12), classes=5))
        found.append((losses, module.get_contiguous_parameters(True)))
    average = np.mean([buffer.numpy() for _, buffer in found], axis=0)
    sizes = [whole.get_parameters_size(True), whole.get_parameters_size(False)]
    whole.copy_buffer_to_parameters(found[1][1], True)
    return {"losses": np.stack([losses for losses, _ in found]), "average": average, "sizes": np.array(sizes),
            **weights_of(server)}  # fmt: skip


@flow
def scheduled(t, folder):
    """The rates of a linear schedule. onnxruntime-training 1.19.2 exchanges its first two arguments."""
    before = folder.parent / "offline_example"
    state, module, optimizer = opened(t, before)
    first, second = (3, 8) if t.api.__name__.startswith("onnxruntime") else (8, 3)
    schedule = t.api.LinearLRScheduler(optimizer, first, second, 0.5)
    rates = [optimizer.get_learning_rate()]
    for batch in batches(16, 10, (6, 12), classes=5):
        module(*batch)
        optimizer.step()
        module.lazy_reset_grad()
        schedule.step()
        rates.append(optimizer.get_learning_rate())
    return {"rates": np.array(rates), **weights_of(state)}


def run(root, folder, flows=()):
    """What these flows saw, or all, by ``flow/name``."""
    t, seen = Training(root), {}
    for name in flows or FLOWS:
        inside = folder / name
        inside.mkdir(exist_ok=True, parents=True)
        seen.update({f"{name}/{key}": np.asarray(value) for key, value in FLOWS[name](t, inside).items()})
    return seen


if __name__ == "__main__":
    found = run(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    np.savez_compressed(Path(sys.argv[2]) / "seen.npz", **found)
    print(f"{len(found)} results in {sys.argv[2]}/seen.npz")
