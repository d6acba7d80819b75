//! `examples/t5_summarize` from pairs of texts to summaries, with few steps: on 4 ranks and on 1, in one go and resumed.

use frit_tests::requirements::Requirement;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const STEPS: usize = 24;
/// Below this a model knows which tokens are frequent; it starts above `FIRST`.
const VALIDATED: f64 = 5.0;
const FIRST: f64 = 7.0;

/// Pairs of a description and a synopsis.
fn pairs() -> String {
    let formats = ["text", "sound", "image", "video", "table", "font", "mail", "archive"];
    let kinds = [
        ("is a library that reads {} files", "library to read {} files"),
        ("is a program that converts {} files, one or many at once", "converter of {} files"),
        ("has the development files of a library for {} data", "{} data - development files"),
    ];
    let name = |i: usize| format!("lib{}{}", char::from(b'a' + (i % 26) as u8), i * 7919 % 997);
    let pair = |i: usize| {
        let (text, summary) = kinds[i % kinds.len()];
        let of = |text: &str| text.replace("{}", formats[i / 3 % formats.len()]);
        let text = format!("The package {} {}.", name(i), of(text));
        serde_json::json!({ "text": text, "summary": of(summary) }).to_string() + "\n"
    };
    (0..400).map(pair).collect()
}

/// The loss that PyTorch computes for `examples()` with the weights of `weights.py` and without dropout.
const PYTORCH: f64 = 8.997195;

/// Eight examples whose texts and summaries have different lengths, as tensors of i64.
fn examples() -> Vec<u8> {
    let (rows, text, summary) = (8, 96, 24);
    let token = |i: usize| (3 + i * 7919 % 4001) as i64;
    let table = |width: usize, value: &dyn Fn(usize, usize) -> i64| -> Vec<i64> {
        (0..rows * width).map(|i| value(i / width, i % width)).collect()
    };
    let in_text = |row: usize, t: usize| t < 20 + 9 * row;
    let in_summary = |row: usize, t: usize| t < 10 + row;
    let ids = |row, t| if in_text(row, t) { token(row * 97 + t) } else { 0 };
    let tensors = [
        ("attention_mask", text, table(text, &|row, t| i64::from(in_text(row, t)))),
        ("decoder_input_ids", summary, table(summary, &|row, t| token(row * 31 + t))),
        ("input_ids", text, table(text, &ids)),
        (
            "labels",
            summary,
            table(summary, &|row, t| {
                if in_summary(row, t) { token(row * 31 + t + 1) } else { -100 }
            }),
        ),
    ];
    let (mut header, mut body) = (serde_json::Map::new(), Vec::new());
    for (name, width, values) in tensors {
        let begin = body.len();
        body.extend(values.iter().flat_map(|x| x.to_le_bytes()));
        let offsets = [begin, body.len()];
        let info =
            serde_json::json!({ "dtype": "I64", "shape": [rows, width], "data_offsets": offsets });
        header.insert(name.into(), info);
    }
    let header = Value::Object(header).to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &body].concat()
}

struct Tutorial {
    packages: PathBuf,
    dir: tempfile::TempDir,
}

impl Tutorial {
    fn out(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs `run.sh`, and returns what it prints.
    fn run(&self, out: &Path, ranks: usize) -> String {
        let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/t5_summarize");
        let output = Command::new(example.join("run.sh"))
            .arg(out)
            .env("FRIT", env!("CARGO_BIN_EXE_frit"))
            .env("PYTHONPATH", &self.packages)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("PAIRS", self.out("pairs.jsonl"))
            .env("PREPARE", "--vocab 200 --train 300 --validation 64")
            .env("RANKS", ranks.to_string())
            .env("STEPS", STEPS.to_string())
            .output()
            .expect("bash starts");
        let (printed, errors) = (&output.stdout, String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{}\n{errors}", String::from_utf8_lossy(printed));
        String::from_utf8_lossy(printed).into_owned()
    }
}

/// The losses of the steps and of the validations of a run.
fn losses(out: &Path) -> (Vec<f64>, Vec<f64>) {
    let text = fs::read_to_string(out.join("metrics.jsonl")).expect("metrics");
    let lines: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
    let of = |key: &str| lines.iter().filter_map(|line| line[key].as_f64()).collect();
    (of("loss"), of("validation_loss"))
}

#[test]
fn texts_become_summaries() {
    let Some(packages) = Requirement::Onnxruntime.find() else { return };
    let tutorial = Tutorial { packages, dir: tempfile::tempdir().expect("a directory") };
    fs::write(tutorial.out("pairs.jsonl"), pairs()).expect("written");
    let (whole, resumed, single) =
        (tutorial.out("whole"), tutorial.out("resumed"), tutorial.out("single"));
    let printed = tutorial.run(&whole, 4);
    let (trained, validated) = losses(&whole);
    assert_eq!((trained.len(), validated.len()), (STEPS, 6));
    assert!(trained[0] > FIRST && validated[5] < VALIDATED, "{trained:?} {validated:?}");

    assert_eq!(printed.matches("\nwritten  ").count(), 8, "{printed}");
    assert!(whole.join("summarizer.onnx").exists());

    // The same data, as tokenizers break ties at random; the first run ends between two checkpoints.
    for out in [&resumed, &single] {
        fs::create_dir(out).expect("a folder");
        for name in ["train.npz", "validation.npz", "tokenizer.json", "test.jsonl"] {
            fs::copy(whole.join(name), out.join(name)).expect("copied");
        }
    }
    std::os::unix::fs::symlink(whole.join("plan"), resumed.join("plan")).expect("a link");
    let begun = Command::new(env!("CARGO_BIN_EXE_frit"))
        .arg("run")
        .arg(resumed.join("plan"))
        .arg("--data")
        .arg(resumed.join("train.npz"))
        .args(["--steps", "10", "--checkpoint"])
        .arg(resumed.join("checkpoints"))
        .arg("--metrics")
        .arg(resumed.join("metrics.jsonl"))
        .output()
        .expect("the program starts");
    assert!(begun.status.success(), "{}", String::from_utf8_lossy(&begun.stderr));
    let again = tutorial.run(&resumed, 4);
    let summaries = |text: &str| text[text.find("text     ").expect("texts")..].to_owned();
    assert_eq!(losses(&resumed).0, trained);
    assert_eq!(losses(&resumed).1.last(), validated.last());
    assert_eq!(summaries(&again), summaries(&printed));

    // The same steps on one rank, which rounds otherwise.
    tutorial.run(&single, 1);
    let (alone, validated_alone) = losses(&single);
    assert!((alone[0] - trained[0]).abs() < 1e-4, "{} {}", alone[0], trained[0]);
    assert!(validated_alone[5] < VALIDATED, "{validated_alone:?}");
}

#[test]
fn the_graph_computes_what_pytorch_does() {
    let Some(packages) = Requirement::Onnxruntime.find() else { return };
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/t5_summarize");
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name);
    fs::copy(example.join("model.onnx"), at("model.onnx")).expect("copied");
    fs::write(at("data.safetensors"), examples()).expect("written");
    let printed = |command: &mut Command| {
        let output = command.output().expect("it starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let mut weights = Command::new("python3");
    weights.arg(example.join("weights.py")).arg(at("model.onnx")).env("PYTHONPATH", packages);
    printed(&mut weights);
    let frit = || Command::new(env!("CARGO_BIN_EXE_frit"));
    let mut compile = frit();
    compile.arg("compile").arg(at("model.onnx")).arg("-o").arg(at("plan")).arg("--config");
    compile.arg(example.join("train.toml")).args(["--bind", "batch=2"]);
    printed(compile.args(["--set", "precision.compute=fp32"]));
    let mut eval = frit();
    eval.arg("eval").arg(at("plan")).arg("--data").arg(at("data.safetensors")).arg("--json");
    let report: Value = serde_json::from_str(&printed(&mut eval)).expect("JSON");
    let loss = report["loss"].as_f64().expect("a loss");
    assert!((loss - PYTORCH).abs() < 1e-4, "{loss} and {PYTORCH}");
}
