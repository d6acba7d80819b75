//! Text becomes shards of tokens that train.

use crate::support::plan;
use flate2::write::GzEncoder;
use frit::tokenize::{Options, Written, tokenize};
use frit_runtime::data::Source;
use frit_runtime::run::{RunOptions, run};
use std::io::Write;
use std::path::{Path, PathBuf};

/// A tokenizer of words: `w0`, `w1` and so on, and the end of a text after the last.
fn tokenizer(dir: &Path, words: usize) -> PathBuf {
    let mut vocabulary: serde_json::Map<String, serde_json::Value> =
        (0..words).map(|i| (format!("w{i}"), i.into())).collect();
    vocabulary.insert("</s>".into(), words.into());
    let json = serde_json::json!({
        "version": "1.0",
        // Neither may cut or pad a document.
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "w0",
        },
        "added_tokens": [],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": null,
        "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    });
    let path = dir.join(format!("tokenizer-{words}.json"));
    std::fs::write(&path, json.to_string()).expect("written");
    path
}

fn options(dir: &Path, texts: &[PathBuf], words: usize) -> Options {
    Options {
        tokenizer: tokenizer(dir, words),
        texts: texts.to_vec(),
        field: "text".into(),
        lines: true,
        separator: None,
        shard_tokens: 1000,
        validation: 0.0,
        folder: tempfile::tempdir_in(dir).expect("a folder").keep(),
    }
}

fn written(options: &Options) -> Written {
    tokenize(options).unwrap_or_else(|e| panic!("{e}"))
}

/// The header's magic, and the tokens.
fn shard(path: &Path) -> (u32, Vec<u32>) {
    let bytes = std::fs::read(path).expect("a shard");
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    let tokens: Vec<u32> = match word(0) {
        20_240_520 => {
            let (words, _) = bytes[1024..].as_chunks::<2>();
            words.iter().map(|b| u32::from(u16::from_le_bytes(*b))).collect()
        }
        _ => bytes[1024..].as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect(),
    };
    assert_eq!(word(8) as usize, tokens.len());
    (word(0), tokens)
}

/// Documents of five words each.
fn documents(n: usize) -> Vec<String> {
    let word = |i: usize| format!("W{}", i * 7 % 50);
    (0..n).map(|d| (0..5).map(|i| word(5 * d + i)).collect::<Vec<_>>().join(" ")).collect()
}

fn text(dir: &Path, name: &str, content: &str) -> PathBuf {
    std::fs::write(dir.join(name), content).expect("written");
    dir.join(name)
}

#[test]
fn documents_become_shards_whatever_they_are_read_from() {
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path();
    let documents = documents(30);
    let expected: Vec<u32> = (0..30)
        .flat_map(|d| (0..5).map(move |i| ((5 * d + i) * 7 % 50) as u32).chain([60]))
        .collect();
    let plain = text(dir, "plain.txt", &documents.join("\r\n\n"));
    let json: String =
        documents.iter().map(|d| format!("{{\"n\": 1, \"text\": \"{d}\"}}\n")).collect();
    let lines = text(dir, "lines.jsonl", &json);
    // Decompressed on the way, and under another name.
    let [unpacked, other] = ["unpacked.jsonl.gz", "lines.txt"].map(|name| text(dir, name, &json));
    let halves = [("a.txt", &documents[..13]), ("b.txt", &documents[13..])];
    let halves = halves.map(|(name, part)| text(dir, name, &part.join("\n")));
    let marked = format!("\u{feff}{json}");
    let packed = [("lines.jsonl.gz", json), ("marked.json.gz", marked)];
    let [packed, marked] = packed.map(|(name, text)| {
        let file = std::fs::File::create(dir.join(name)).expect("created");
        // Two members, as compressors that work in parallel write them.
        let (first, rest) = text.as_bytes().split_at(100);
        for part in [first, rest] {
            let mut out = GzEncoder::new(&file, flate2::Compression::default());
            out.write_all(part).and_then(|()| out.finish()).expect("written");
        }
        dir.join(name)
    });
    for texts in [&[plain][..], &[lines], &[unpacked], &[other], &halves, &[packed], &[marked]] {
        let done = written(&options(dir, texts, 60));
        assert_eq!((done.documents, done.tokens, done.vocabulary), (30, [180, 0], 61));
        assert_eq!(done.separator, "</s>");
        assert_eq!(shard(&done.shards[0][0]), (20_240_520, expected.clone()));
    }
    // The folder of a tokenizer.
    let folder = dir.join("tokenizer");
    std::fs::create_dir(&folder).expect("a folder");
    let some = options(dir, &halves, 60);
    std::fs::copy(&some.tokenizer, folder.join("tokenizer.json")).expect("a copy");
    assert_eq!(written(&Options { tokenizer: folder, ..some }).tokens, [180, 0]);
    // A whole file is a document; ids beyond uint16 take four bytes.
    let whole = Options { lines: false, ..options(dir, &halves, 70_000) };
    let done = written(&whole);
    let (magic, tokens) = shard(&done.shards[0][0]);
    let ends: Vec<usize> = (0..tokens.len()).filter(|i| tokens[*i] == 70_000).collect();
    assert_eq!((magic, ends, done.documents), (20_240_801, vec![65, 151], 2));
}

#[test]
fn shards_end_where_they_are_full_and_validation_is_spread() {
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path();
    let texts = [text(dir, "plain.txt", &documents(40).join("\n"))];
    let some = Options { shard_tokens: 50, validation: 0.1, ..options(dir, &texts, 60) };
    let done = written(&some);
    assert_eq!(done.tokens, [36 * 6, 4 * 6]);
    let sizes: Vec<usize> = done.shards[0].iter().map(|path| shard(path).1.len()).collect();
    assert_eq!(sizes, [50, 50, 50, 50, 16]);
    let (_, tokens) = shard(&done.shards[1][0]);
    // Every tenth document.
    let firsts: Vec<u32> = tokens.chunks(6).map(|d| d[0]).collect();
    assert_eq!(firsts, [9, 19, 29, 39].map(|d| (5 * d * 7 % 50) as u32));
    let before =
        done.shards.concat().iter().map(|p| std::fs::read(p).expect("read")).collect::<Vec<_>>();
    let report = tokenize(&some).expect_err("nothing is overwritten");
    assert!(report.to_string().contains("has shards already"), "{report}");
    let again = written(&Options { folder: dir.join("again"), ..some });
    let after =
        again.shards.concat().iter().map(|p| std::fs::read(p).expect("read")).collect::<Vec<_>>();
    assert_eq!(before, after);

    let loss = ["loss.kind=cross_entropy", "loss.logits=logits", "loss.labels=labels"];
    let planned = plan("examples/char_gpt2/model.json", 1, &loss);
    let long = [text(dir, "long.txt", &documents(200).join("\n"))];
    let done = written(&options(dir, &long, 60));
    let data = Source::new(done.shards[0].clone(), None);
    let options = RunOptions { steps: 2, data, threads: Some(1), ..RunOptions::default() };
    let report = run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"));
    assert!(report.losses.iter().all(|loss| loss.is_finite()));
}

#[test]
fn texts_that_cannot_be_tokenized_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path();
    let refused = |options: &Options, part: &str| {
        let report = tokenize(options).expect_err("it is refused");
        assert_eq!(report.diagnostics[0].code, "E114");
        assert!(report.to_string().contains(part), "{report}");
        assert_eq!(std::fs::read_dir(&options.folder).expect("a folder").count(), 0);
    };
    let of = |name: &str, content: &str| options(dir, &[text(dir, name, content)], 60);
    refused(
        &of("a.jsonl", "{\"text\": \"w1\"}\n{\"body\": \"w1\"}\n"),
        "line 2: it has no field `text`, but `body`",
    );
    let long = format!("{}{{", "{\"text\": \"w1 w2 w3 w4\"}\n".repeat(400_000));
    refused(&Options { shard_tokens: 50, ..of("long.jsonl", &long) }, "line 400001");
    refused(&of("b.jsonl", "{\"text\": 1}\n"), "line 1: the field `text` is not text");
    refused(
        &of("c.jsonl", "{\"text\"\n"),
        "c.jsonl, line 1: it is no JSON: EOF while parsing an object at column",
    );
    refused(&of("list.json", "[{\"text\": \"w1\"},\n{\"text\": \"w1\"}]\n"), "jq -c '.[]'");
    refused(&of("number.jsonl", "1\n"), "line 1: it is no JSON object with the field `text`");
    let latin = options(dir, &[dir.join("latin.txt")], 60);
    std::fs::write(&latin.texts[0], b"w1\nw2\nnai\xefve\n").expect("written");
    refused(&latin, "latin.txt, line 3: it is not text in UTF-8");
    refused(&Options { lines: false, ..latin }, "latin.txt, line 3: it is not text in UTF-8");
    let packed = options(dir, &[dir.join("text.jsonl.zst")], 60);
    std::fs::write(&packed.texts[0], [0x28, 0xb5, 0x2f, 0xfd, 0]).expect("written");
    refused(&packed, "compressed with zstd");
    let few = of("few.txt", "w1\nw2\nw3\n");
    refused(&Options { validation: 0.1, ..few.clone() }, "to one part of 3 documents");
    refused(&Options { validation: 0.9, lines: false, ..few }, "to one part of 1 document");
    refused(&of("d.txt", " \n\n"), "no document");
    refused(&options(dir, &[dir.join("none.txt")], 60), "none.txt");
    let good = of("e.txt", "w1 w2");
    refused(&Options { separator: Some("<end>".into()), ..good.clone() }, "`<end>` is not in");
    refused(&Options { tokenizer: dir.join("e.txt"), ..good }, "e.txt");
}
