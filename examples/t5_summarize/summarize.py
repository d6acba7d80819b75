#!/usr/bin/env python3
"""Summarize texts with the exported model, by greedy decoding in onnxruntime.

    python3 summarize.py OUT [--count 8] [--model FILE] [TEXT ...]

Without texts, those of OUT/test.jsonl, which the model was not trained on, beside the summaries that people wrote.
Needs numpy, onnxruntime and tokenizers.
"""
import argparse
import json
import pathlib

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

PAD, END = 0, 1


def summarize(session, tokenizer, texts):
    """The most likely next token, until the end or until the summary is full."""
    sizes = {i.name: i.shape[1] for i in session.get_inputs()}
    ids = np.full((len(texts), sizes["input_ids"]), PAD, np.int64)
    for row, text in zip(ids, tokenizer.encode_batch(texts)):
        kept = text.ids[:len(row)]
        row[:len(kept)] = kept
    inputs = {"input_ids": ids, "attention_mask": (ids != PAD).astype(np.int64)}
    summary = np.full((len(texts), sizes["decoder_input_ids"]), PAD, np.int64)
    ended = np.zeros(len(texts), bool)
    for t in range(summary.shape[1] - 1):
        logits, = session.run(["logits"], {**inputs, "decoder_input_ids": summary})
        # Padding is no token of a summary, and nothing was learned about it.
        logits[..., PAD] = -np.inf
        summary[:, t + 1] = np.where(ended, PAD, logits[:, t].argmax(-1))
        ended |= summary[:, t + 1] == END
        if ended.all():
            break
    return [tokenizer.decode([i for i in row if i > END]) for row in summary.tolist()]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("texts", nargs="*", metavar="TEXT")
    parser.add_argument("--model", type=pathlib.Path, help="the exported model (OUT/summarizer.onnx)")
    parser.add_argument("--count", type=int, default=8, help="texts of OUT/test.jsonl")
    args = parser.parse_args()
    onnxruntime.set_default_logger_severity(3)
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    session = onnxruntime.InferenceSession(args.model or args.out / "summarizer.onnx", providers=["CPUExecutionProvider"])
    pairs = [{"text": text} for text in args.texts]
    pairs = pairs or [json.loads(line) for line in (args.out / "test.jsonl").read_text().splitlines()[:args.count]]
    for pair, summary in zip(pairs, summarize(session, tokenizer, [pair["text"] for pair in pairs])):
        print(f"text     {pair['text']}")
        if "summary" in pair:
            print(f"written  {pair['summary']}")
        print(f"model    {summary}\n")


if __name__ == "__main__":
    main()
