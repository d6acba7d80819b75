"""The random numbers that Frit draws, by their definition (ir/src/ops/random.rs)."""
import numpy as np


def words(numbers, name, seed):
    """Words of the numbers of one tensor, by Philox4x32-10."""
    block = numbers // 4
    counter = [block & 0xFFFFFFFF, block >> 32, np.full_like(block, name), np.zeros_like(block)]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [b >> 32 ^ counter[1] ^ key[0], b & 0xFFFFFFFF, a >> 32 ^ counter[3] ^ key[1], a & 0xFFFFFFFF]
        key = [key[0] + 0x9E3779B9 & 0xFFFFFFFF, key[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return np.choose((numbers % 4).astype(np.int64), counter)


def numbers(shape, position):
    return np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(position * np.prod(shape))


def uniform(shape, position, name, seed=0):
    w = words(numbers(shape, position), name, seed)
    return ((2 * (w >> 9) + 1) * 2.0**-24).astype(np.float32).reshape(shape)


def normal(shape, position, name, seed=0):
    i = numbers(shape, position)
    u = (words(i & ~np.uint64(1), name, seed) | 1).astype(np.float32).astype(np.float64) / 2**32
    angle = words(i | 1, name, seed) * (2 * np.pi / 2**32)
    z = np.sqrt(-2 * np.log(u)) * np.where(i % 2 == 0, np.cos(angle), np.sin(angle))
    return z.astype(np.float32).reshape(shape)


def without_traces(path):
    """Takes the exporter's stack traces out of a model: they name files of the machine that it was made on."""
    import onnx

    model = onnx.load(path)
    for node in model.graph.node:
        kept = [p for p in node.metadata_props if p.key != "pkg.torch.onnx.stack_trace"]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    onnx.save(model, path)


def write_reference(net, x, draw, steps=3, batch=8):
    """PyTorch's loss of so many batches, with what `draw(position)` sets for each, and the gradients of the first."""
    import torch
    from safetensors.torch import save_file

    losses, tensors = [], {}
    for step in range(steps):
        draw(step)
        loss = net(x[step * batch : (step + 1) * batch])
        if step == 0:
            loss.backward()
            tensors = {f"grad/{name}": p.grad for name, p in net.named_parameters()}
        losses.append(loss.detach())
    save_file({"losses": torch.stack(losses), **tensors}, "reference.safetensors")
