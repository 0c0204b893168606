"""Models assembled field by field, so that tests can make any field invalid."""

from onnx import TensorProto, helper

X = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])


Z = helper.make_tensor_value_info("z", TensorProto.FLOAT, [])


Y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])


def model(nodes=None, weights=(), inputs=(X,), outputs=(Y,), opset=17, ir_version=10, functions=()):
    nodes = [helper.make_node("Relu", ["x"], ["y"], name="r")] if nodes is None else nodes
    graph = helper.make_graph(nodes, "g", list(inputs), list(outputs), list(weights))
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=ir_version, functions=list(functions))


def node(op, inputs, outputs, **attrs):
    return helper.make_node(op, inputs.split(), outputs.split(), name=f"n_{op}", **attrs)


def tensor(name="w", dims=(3,), dtype=TensorProto.FLOAT, raw=bytes(12)):
    return TensorProto(name=name, dims=dims, data_type=dtype, raw_data=raw)


def external(location, name="w", dims=(3,), **entries):
    found = TensorProto(name=name, dims=dims, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        found.external_data.add(key=key, value=str(value))
    return found


ADD = [node("Add", "x w", "y")]


def external_model(*args, **kwargs):
    return model(ADD, [external(*args, **kwargs)])
