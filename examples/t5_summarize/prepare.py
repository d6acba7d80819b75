#!/usr/bin/env python3
"""Train a tokenizer on pairs of texts and summaries, and write them as padded and masked arrays.

    python3 prepare.py PAIRS.jsonl OUT [--vocab 4096] [--text 96] [--summary 24] [--train 20000] [--validation 1000]

OUT/ receives
    tokenizer.json       a Unigram model with T5's special tokens: 0 pads, 1 ends, 2 is unknown
    train.npz, validation.npz
        input_ids          i16 [pairs, text], the text, padded with 0
        attention_mask     u8 [pairs, text], 1 for tokens and 0 for padding
        decoder_input_ids  i16 [pairs, summary], the summary shifted right by one, beginning with 0
        labels             i16 [pairs, summary], the summary and its end, padded with -100, which the loss ignores
    test.jsonl           the pairs of the validation, for summarize.py

Pairs that are longer are left out, not cut. Needs numpy and tokenizers.
"""
import argparse
import hashlib
import json
import pathlib

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

PAD, END, UNKNOWN = range(3)
SPECIAL = ["<pad>", "</s>", "<unk>"]
IGNORED = -100
# More of them change little and take minutes.
TOKENIZER_PAIRS = 10000


def train_tokenizer(texts, vocab):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Digits(individual_digits=True)])
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=vocab, special_tokens=SPECIAL, unk_token=SPECIAL[UNKNOWN], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return tokenizer


def padded(rows, length, fill):
    array = np.full((len(rows), length), fill, np.int16)
    for target, row in zip(array, rows):
        target[:len(row)] = row
    return array


def write(path, pairs, args):
    texts, summaries = zip(*pairs)
    labels = padded(summaries, args.summary, IGNORED)
    begun = np.roll(np.where(labels == IGNORED, PAD, labels), 1, axis=1)
    begun[:, 0] = PAD
    ids = padded(texts, args.text, PAD)
    np.savez(path, input_ids=ids, attention_mask=(ids != PAD).astype(np.uint8), decoder_input_ids=begun, labels=labels)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("pairs", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--text", type=int, default=96, help="tokens of a text, with its end")
    parser.add_argument("--summary", type=int, default=24, help="tokens of a summary, with its end")
    parser.add_argument("--train", type=int, default=20000, help="pairs to train on, at most")
    parser.add_argument("--validation", type=int, default=1000, help="pairs to validate on")
    args = parser.parse_args()

    # An order that depends on each text alone: the same pairs are the same data.
    pairs = [json.loads(line) for line in args.pairs.open()]
    pairs.sort(key=lambda pair: hashlib.sha256(pair["text"].encode()).digest())
    learned = pairs[args.validation:][-TOKENIZER_PAIRS:]
    tokenizer = train_tokenizer((text for pair in learned for text in pair.values()), args.vocab)
    tokenizer.save(str(args.out / "tokenizer.json"))

    texts, summaries = ([e.ids for e in tokenizer.encode_batch([pair[key] for pair in pairs])] for key in ("text", "summary"))
    fits = [i for i in range(len(pairs)) if len(texts[i]) <= args.text and len(summaries[i]) <= args.summary]
    test, train = fits[:args.validation], fits[args.validation:][:args.train]
    with (args.out / "test.jsonl").open("w") as out:
        out.writelines(json.dumps(pairs[i], ensure_ascii=False) + "\n" for i in test)
    for name, chosen in (("validation", test), ("train", train)):
        write(args.out / f"{name}.npz", [(texts[i], summaries[i]) for i in chosen], args)
    tokens = sum(len(texts[i]) for i in train) / max(1, len(train))
    print(f"{len(train)} pairs to train on, {len(test)} to validate on; {tokens:.0f} of {args.text} tokens of a text are not padding")


if __name__ == "__main__":
    main()
