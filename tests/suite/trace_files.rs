//! Files of pass traces whose bytes were changed at random, and plans with a trace that are far from their model.

use crate::bits::many;
use crate::certificate::{compiled, configured, plans};
use crate::pass_trace::{begin, compute_the_same};
use crate::simulate::frit;
use crate::support::{file, plan};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use frit::certificate::certify;
use frit::pass_trace::read;
use frit::plan_dir;
use frit_ir::Severity;
use frit_ir::plan::{layout, seal, sha256_hex};
use std::collections::BTreeMap;
use std::io::{Read, Write};

fn unpacked(trace: &[u8]) -> Vec<u8> {
    let mut json = vec![];
    GzDecoder::new(trace).read_to_end(&mut json).expect("a trace");
    json
}

fn packed(json: &[u8]) -> Vec<u8> {
    let mut file = GzEncoder::new(vec![], Compression::fast());
    file.write_all(json).expect("memory");
    file.finish().expect("memory")
}

/// Bits flipped, an end cut off, or bytes left out or doubled.
fn damage(bytes: &mut Vec<u8>, random: &mut fastrand::Rng) {
    let at = random.usize(..bytes.len());
    let end = (at + random.usize(1..9)).min(bytes.len());
    match random.u8(..4) {
        0 => bytes[at] ^= 1 << random.u8(..8),
        1 => bytes.truncate(at),
        2 => drop(bytes.drain(at..end)),
        _ => {
            let part = bytes[at..end].to_vec();
            bytes.splice(at..at, part);
        }
    }
}

/// Another digit in place of one, so that the text stays JSON.
fn other_digit(json: &mut [u8], random: &mut fastrand::Rng) {
    let digits: Vec<usize> = (0..json.len()).filter(|i| json[*i].is_ascii_digit()).collect();
    let at = *random.choice(&digits).expect("a trace has numbers");
    json[at] = random.digit(10) as u8;
}

/// Another word of the trace in place of one: operations, dtypes, names and keys.
fn other_word(json: &mut Vec<u8>, random: &mut fastrand::Rng) {
    let quotes: Vec<usize> = (0..json.len()).filter(|i| json[*i] == b'"').collect();
    let words: Vec<_> = quotes.as_chunks::<2>().0.iter().map(|[a, b]| *a..*b).collect();
    let (from, to) = (random.choice(&words).cloned(), random.choice(&words).cloned());
    let (from, to) = from.zip(to).expect("a trace has words");
    let word = json[from].to_vec();
    json.splice(to, word);
}

/// Changes of each of two traces.
const MUTANTS: usize = 400;

#[test]
fn damaged_traces_are_refused_or_certify_the_same_step() {
    let mut random = fastrand::Rng::with_seed(21);
    let mut refused: BTreeMap<String, usize> = BTreeMap::new();
    let [mut open, mut certified] = [0; 2];
    for (model, settings) in [
        ("tests/models/mlp/model.onnx", &["loss.kind=cross_entropy", "sharding.ranks=2"][..]),
        ("tests/museum/models/lm.json", &["sharding.ranks=3", "precision.compute=fp32"]),
    ] {
        let (request, config) = configured(model, 2, settings);
        let made = compiled(&request, &config);
        let begin = begin(&request, &config);
        let last = |trace: &[u8]| {
            let (stages, _) = read(trace, &begin).unwrap_or_else(|e| panic!("{e}"));
            stages.last().expect("passes").graph.clone()
        };
        let (expected, json) = (last(&made.pass_trace), unpacked(&made.pass_trace));
        for attempt in 0..MUTANTS * many() {
            let mut changed = json.clone();
            let trace = match attempt % 8 {
                0 | 1 => {
                    let mut trace = made.pass_trace.clone();
                    damage(&mut trace, &mut random);
                    trace
                }
                2 => {
                    damage(&mut changed, &mut random);
                    packed(&changed)
                }
                3 => {
                    other_word(&mut changed, &mut random);
                    packed(&changed)
                }
                _ => {
                    (0..=attempt % 3).for_each(|_| other_digit(&mut changed, &mut random));
                    packed(&changed)
                }
            };
            match certify(&request, &config, &trace, plans(&made)) {
                Err(report) => {
                    for diagnostic in &report.diagnostics {
                        assert_eq!(diagnostic.severity, Severity::Error, "{report}");
                        assert!(diagnostic.code.starts_with('E'), "{report}");
                    }
                    *refused.entry(report.diagnostics[0].code.to_string()).or_default() += 1;
                }
                Ok(found) if found.holds() => {
                    assert!(compute_the_same(&expected, &last(&trace)), "{model}: certified");
                    certified += 1;
                }
                Ok(_) => open += 1,
            }
        }
    }
    assert!(refused["E118"] > 300 && open > 20 && certified > 5, "{refused:?} {open} {certified}");
}

/// The same through the command, whose plan has the digest of the damaged file.
#[test]
fn the_command_refuses_damaged_traces_with_a_code() {
    let planned = plan("tests/models/mlp/model.onnx", 4, &["sharding.ranks=2"]);
    let (dir, model) = (planned.path(), file("tests/models/mlp/model.onnx"));
    let own = std::fs::read(dir.join(layout::PASS_TRACE)).expect("a trace");
    let mut plan = plan_dir::read(&dir).unwrap_or_else(|e| panic!("{e}"));
    let mut random = fastrand::Rng::with_seed(22);
    let mut refused = 0;
    for attempt in 0..60 {
        let mut trace = if attempt % 2 == 0 { own.clone() } else { unpacked(&own) };
        damage(&mut trace, &mut random);
        let trace = if attempt % 2 == 0 { trace } else { packed(&trace) };
        std::fs::write(dir.join(layout::PASS_TRACE), &trace).expect("written");
        plan.pass_trace = Some(sha256_hex(&trace));
        std::fs::write(dir.join(layout::PLAN), seal(&plan.to_json())).expect("written");
        let [dir, model] = [&dir, &model].map(|path| path.to_str().expect("UTF-8"));
        match frit(&["verify", dir, "--model", model]) {
            Err(message) => {
                assert!(message.starts_with("the pass trace is not one of"), "{message}");
                refused += 1;
            }
            Ok(page) => assert!(page.contains("certified"), "{page}"),
        }
    }
    assert!(refused > 50, "{refused}");
}

/// Plans that were moved, and whose model is gone, are used as before; what needs weights or a model that is nowhere says so.
#[test]
fn plans_with_a_trace_go_on_without_their_model() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_string();
    let [data, model] = ["data.safetensors", "model.onnx"].map(path);
    for name in ["data.safetensors", "model.onnx"] {
        std::fs::copy(file("tests/models/mlp").join(name), path(name)).expect("copied");
    }
    for (weights, made) in [("copy", "made"), ("none", "made without")] {
        let compile = ["compile", &model, "--bind", "batch=4", "--set", "loss.kind=cross_entropy"];
        let more = ["--weights", weights, "-o", &path(made)];
        frit(&[&compile[..], &more].concat()).unwrap_or_else(|e| panic!("{e}"));
        std::fs::rename(path(made), path(weights)).expect("moved");
    }
    std::fs::remove_file(&model).expect("removed");
    let (whole, bare) = (path("copy"), path("none"));
    let [report, trained, onnx] = ["report.html", "trained.safetensors", "trained.onnx"].map(path);
    let works = |args: &[&str]| frit(args).unwrap_or_else(|e| panic!("{args:?}: {e}"));
    for plan in [&whole, &bare] {
        works(&["verify", plan, "--quick"]);
        works(&["inspect", plan, "--view", "kernels"]);
        works(&["diff", plan, &whole]);
        works(&["simulate", plan, "--cluster", "h100"]);
        works(&["report", plan, "-o", &report]);
    }
    assert!(works(&["verify", &whole]).contains("certified: every rank"));
    works(&["run", &whole, "--data", &data, "--steps", "2", "--save", &trained]);
    works(&["eval", &whole, "--data", &data, "--weights", &trained]);
    works(&["export", &whole, "--weights", &trained, "-o", &onnx]);
    let fails = |args: &[&str]| frit(args).expect_err("it lacks something");
    let refused = fails(&["verify", &bare]);
    assert!(refused.contains("No such file") && refused.contains("--model"), "{refused}");
    let refused = fails(&["run", &bare, "--data", &data, "--steps", "2"]);
    assert!(refused.contains("no value") && refused.contains("--weights copy"), "{refused}");
    // The bare plan is not one of the model that was trained.
    let refused = fails(&["verify", &bare, "--model", &onnx]);
    assert!(!refused.contains("internal"), "{refused}");
}
