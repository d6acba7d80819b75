#!/usr/bin/env python3
"""Export a GPT-2 of any size from `transformers` to ONNX, for training with Frit.

    python export_gpt2.py OUT.onnx [--layers 12 --width 768 --heads 12 --context 1024 --vocab 50257]
                          [--seq 1024] [--seed 0] [--data data.safetensors --batches 20 --batch 4]

The defaults are GPT-2 124M. The weights are random, from --seed. The graph takes `input_ids` [batch, seq] and gives
`logits` [batch, seq, vocab]; `batch` stays symbolic (give it to `frit compile --bind batch=N`), `seq` is fixed.
Dropout is off, and the graph optimizer is off as well: it would merge parameters that happen to start with equal
values. A model whose weights exceed 100 MB gets them in a file OUT.onnx.data beside it. --data also writes random
tokens as `input_ids` and `labels`, for timing. Needs torch, transformers, onnx, onnxscript, safetensors.
"""
import argparse, pathlib


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=pathlib.Path)
    p.add_argument("--layers", type=int, default=12)
    p.add_argument("--width", type=int, default=768)
    p.add_argument("--heads", type=int, default=12)
    p.add_argument("--context", type=int, default=1024, help="rows of the position table")
    p.add_argument("--vocab", type=int, default=50257)
    p.add_argument("--seq", type=int, help="tokens per example in the graph (default: the context)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--data", type=pathlib.Path, help="also write random tokens here, as .safetensors")
    p.add_argument("--batches", type=int, default=20)
    p.add_argument("--batch", type=int, default=4)
    return p.parse_args()


def strip_traces(path):
    """Remove the exporter's Python stack traces: they hold paths of this machine, and are most of a small file."""
    import onnx

    model = onnx.load(path)
    for node in model.graph.node:
        kept = [p for p in node.metadata_props if p.key != "pkg.torch.onnx.stack_trace"]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    onnx.save(model, path)


def main():
    a = arguments()
    seq = a.seq or a.context
    import torch
    import transformers as hf

    class Logits(torch.nn.Module):
        """Token ids in, logits out."""

        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, input_ids):
            return self.net(input_ids=input_ids).logits

    torch.manual_seed(a.seed)
    config = hf.GPT2Config(vocab_size=a.vocab, n_positions=a.context, n_embd=a.width, n_layer=a.layers, n_head=a.heads,
                           resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    net = hf.GPT2LMHeadModel(config).train()
    n_params = sum(p.numel() for p in net.parameters())
    a.out.parent.mkdir(parents=True, exist_ok=True)
    external = 4 * n_params > 100_000_000
    if external:  # the exporter appends to a file that exists
        a.out.with_name(a.out.name + ".data").unlink(missing_ok=True)
    # Traced at batch 2: the exporter takes a size of 1 for a constant.
    torch.onnx.export(Logits(net), (torch.zeros(2, seq, dtype=torch.int64),), str(a.out), dynamo=True,
                      opset_version=18, optimize=False, external_data=external, input_names=["input_ids"],
                      output_names=["logits"], dynamic_shapes=({0: "batch"},))
    if not external:
        strip_traces(a.out)
    print(f"{a.out}: {n_params:,} parameters, input_ids [batch, {seq}], logits [batch, {seq}, {a.vocab}]")
    if a.data:
        from safetensors.torch import save_file

        g = torch.Generator().manual_seed(a.seed + 1)
        x = torch.randint(0, a.vocab, (a.batches * a.batch, seq + 1), generator=g)
        save_file({"input_ids": x[:, :-1].contiguous(), "labels": x[:, 1:].contiguous()}, a.data)
        print(f"{a.data}: {len(x)} examples of {seq} random tokens")


if __name__ == "__main__":
    main()
