#!/usr/bin/env python3
"""Export T5ForConditionalGeneration of transformers for training.

    python3 export.py MODEL.onnx [--width 512 --ffn 2048 --layers 6 --heads 8 --head 64 --vocab 32128]   # T5-small's shape
    python3 export.py MODEL.onnx --pretrained PATH

MODEL.onnx receives the graph, MODEL.onnx.data the weights beside it. `model.onnx` and `t5_small.onnx` in this folder were made by this,
without their weights: weights.py writes those. Needs torch, transformers, onnx and onnxscript.
"""
import argparse
import pathlib

import onnx
import torch
from transformers import T5Config, T5ForConditionalGeneration

INPUTS = ["input_ids", "attention_mask", "decoder_input_ids"]


class Logits(torch.nn.Module):
    """The model from its inputs, by position, to the tensor that the loss reads."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, *inputs):
        return self.net(**dict(zip(INPUTS, inputs)), use_cache=False).logits


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--pretrained", help="a folder with the weights of a T5, instead of a shape")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--ffn", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6, help="of the encoder, and of the decoder")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head", type=int, default=64, help="size of a head")
    parser.add_argument("--vocab", type=int, default=32128)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--text", type=int, default=96, help="tokens of a text")
    parser.add_argument("--summary", type=int, default=24, help="tokens of a summary")
    args = parser.parse_args()

    if args.pretrained:
        net = T5ForConditionalGeneration.from_pretrained(args.pretrained, dropout_rate=args.dropout)
    else:
        net = T5ForConditionalGeneration(T5Config(
            vocab_size=args.vocab, d_model=args.width, d_kv=args.head, d_ff=args.ffn, num_layers=args.layers,
            num_heads=args.heads, dropout_rate=args.dropout, decoder_start_token_id=0))
    # Each input is a tensor of its own: the exporter takes equal objects for one input.
    example = tuple(torch.ones(2, length, dtype=torch.long) for length in (args.text, args.text, args.summary))
    batch = {0: "batch"}
    torch.onnx.export(
        Logits(net).train(), example, args.model,
        dynamo=True, opset_version=18, optimize=False, external_data=True,
        input_names=INPUTS, output_names=["logits"], dynamic_shapes=((batch, batch, batch),))

    # The exporter records where in the Python source each node is from: most of the file, with paths of this machine.
    graph = onnx.load(args.model, load_external_data=False)
    for node in graph.graph.node:
        kept = [p for p in node.metadata_props if p.key == "pkg.torch.onnx.name_scopes"]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    del graph.graph.value_info[:]
    onnx.save(graph, args.model)


if __name__ == "__main__":
    main()
