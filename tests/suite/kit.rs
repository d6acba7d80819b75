//! `check.sh`, the script that checks and times on a GPU, over stand-ins of the programs that it runs: whatever these do, it
//! ends within its deadline with the table written, and another call goes on from there.

use crate::stand_ins::FOLDER;
use crate::support::file;
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A folder as prepare.sh makes it, with stand-ins.
struct Kit {
    dir: tempfile::TempDir,
}

/// What a call did.
struct Called {
    code: Option<i32>,
    said: String,
    seconds: f64,
    out: PathBuf,
}

impl Kit {
    fn new() -> Kit {
        let kit = Kit { dir: tempfile::tempdir().expect("a directory") };
        for folder in ["bin", "llm.c", "plans", "references", "data", "work"] {
            fs::create_dir(kit.path(folder)).expect("a folder");
        }
        for name in [
            "check.sh",
            "check.py",
            "rows.py",
            "process.py",
            "table.py",
            "tensors.py",
            "make_models.py",
        ] {
            fs::copy(file("examples/gpu").join(name), kit.path(name)).expect("copied");
        }
        let stand_ins = [
            ("frit-run", "bin/frit-run"),
            ("peer.py", "peer.py"),
            ("peer.py", "llmc.py"),
            ("train_gpt2cu", "llm.c/train_gpt2cu"),
        ];
        for (from, to) in stand_ins {
            fs::copy(file("tests/kit").join(from), kit.path(to)).expect("copied");
        }
        fs::write(kit.path("data/tokens.bin"), [7_u8; 4096]).expect("written");
        kit.write_entries("abc1234");
        kit
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The entries of a kit of this commit, and what they need.
    fn write_entries(&self, commit: &str) {
        let mut lines =
            vec![json!({"device": "cuda", "arch": "sm_90", "commit": commit}).to_string()];
        for (stage, name, ranks) in [
            ("correctness", "mlp-fp32", 1),
            ("correctness", "gpt2-bf16", 1),
            ("correctness", "operations-fp32", 1),
            ("correctness", "bert-fp32", 1),
            ("train", "gpt2_tiny-fp32-4-1", 1),
            ("time", "gpt2_tiny-bf16-8-1", 1),
            ("time", "bert_tiny-bf16-8-1", 1),
            ("ranks", "gpt2-ranks-1", 1),
            ("ranks", "gpt2-ranks-2", 2),
            ("sanitize", "mlp-fp32", 1),
        ] {
            let mut parts = name.split('-');
            let (model, precision) = (parts.next(), parts.next());
            let entry = json!({
                "stage": stage, "name": name, "model": model, "precision": precision, "data": "data/tokens.bin",
                "batch": 8, "ranks": ranks,
            });
            lines.push(entry.to_string());
            fs::create_dir_all(self.path("plans").join(name)).expect("a folder");
            let reference = self.path("references").join(name);
            fs::create_dir_all(&reference).expect("a folder");
            let losses: Vec<String> =
                (0..5).map(|s| json!({"loss": 3.0 - 0.1 * f64::from(s)}).to_string()).collect();
            fs::write(reference.join("metrics.jsonl"), losses.join("\n") + "\n").expect("written");
            let header = r#"{"layer.weight":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}"#;
            let values = [1.0_f32, 2.0, 3.0, 4.0].map(f32::to_le_bytes).concat();
            let tensors =
                [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &values].concat();
            fs::write(reference.join("grads.safetensors"), tensors).expect("written");
        }
        fs::write(self.path("kit.jsonl"), lines.join("\n") + "\n").expect("written");
    }

    fn start(&self, out: &str, arguments: &[&str], will: &Value) -> Child {
        let mut check = Command::new(self.path("check.sh"));
        check
            .args(["--out", self.path(out).to_str().expect("Unicode"), "--jobs", "2"])
            .args(arguments);
        check.arg("--work").arg(self.path("work"));
        check.env("STUB_LOG", self.log(out)).env("STUB_WILL", will.to_string());
        // A driver that the GPU can be held open with.
        check.env("LD_LIBRARY_PATH", &*FOLDER).env_remove("FRIT_CUDA_PATH");
        check.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().expect("bash and python3")
    }

    fn call(&self, out: &str, arguments: &[&str], will: &Value) -> Called {
        let (child, begin) = (self.start(out, arguments, will), Instant::now());
        let output = child.wait_with_output().expect("an end");
        let seconds = begin.elapsed().as_secs_f64();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        Called { code: output.status.code(), said, seconds, out: self.path(out) }
    }

    fn log(&self, out: &str) -> PathBuf {
        self.path(&format!("{out}.log"))
    }

    /// How programs were called.
    fn calls(&self, out: &str) -> Vec<String> {
        let text = fs::read_to_string(self.log(out)).unwrap_or_default();
        text.lines().map(str::to_string).collect()
    }
}

impl Called {
    fn row(&self, stage: &str, name: &str) -> Value {
        let text = fs::read_to_string(self.out.join("results.json")).expect("results");
        let results: Value = serde_json::from_str(&text).expect("JSON");
        results["stages"][stage][name].clone()
    }

    fn table(&self) -> String {
        fs::read_to_string(self.out.join("gpu.md")).expect("the table")
    }

    /// Stages and rows in the order in which they were done.
    fn order(&self) -> Vec<&str> {
        let rows = self
            .said
            .lines()
            .filter(|l| ["ok   ", "FAIL ", "--   "].iter().any(|m| l.starts_with(m)));
        rows.map(|l| l[5..].split(' ').next().expect("a stage")).collect()
    }
}

fn position(text: &str, part: &str) -> usize {
    text.find(part).unwrap_or_else(|| panic!("`{part}` is not in {text}"))
}

#[test]
fn stages_come_in_order_and_every_row_names_its_software() {
    let kit = Kit::new();
    let called = kit.call("out", &["--deadline", "120"], &json!({"max-autotune": "large"}));
    assert_eq!(called.code, Some(0), "{}", called.said);
    let mut order = called.order();
    order.dedup();
    let expected = [
        "machine",
        "smoke",
        "first",
        "correctness",
        "train",
        "time",
        "correctness",
        "ranks",
        "first",
        "time",
        "sanitize",
    ];
    assert_eq!(order, expected, "{}", called.said);
    // The GPU is opened first; models that matter most are checked, and timed, before others.
    let row = |text: &str| position(&called.said, text);
    assert!(row("ok   machine context") < row("ok   machine libraries"));
    assert!(row("correctness operations-fp32 steps") < row("train gpt2_tiny-fp32-4-1"));
    assert!(row("time gpt2_tiny-bf16-8-1 frit") < row("correctness bert-fp32 kernels"));
    assert!(row("correctness bert-fp32 kernels") < row("first bert_tiny-bf16-8-1"));
    for (stage, name) in [("smoke", "mlp-fp32 kernels"), ("time", "gpt2_tiny-bf16-8-1 llm.c")] {
        let row = called.row(stage, name);
        assert_eq!(row["ok"], true, "{row}");
        assert_eq!(row["software"]["driver"], "CUDA 13.0, /lib/libcuda.so.580.1");
        assert_eq!(row["software"]["PyTorch"], "torch 2.11.0, path /site/torch");
        assert_eq!(row["commit"], "abc1234");
    }
    // llm.c is timed with its better setting; a batch that is too large for a peer is halved for it.
    let llmc = called.row("time", "gpt2_tiny-bf16-8-1 llm.c");
    assert_eq!((&llmc["step_s"], &llmc["gelu_fusion"]), (&json!(0.1), &json!(2)));
    assert_eq!(
        called.row("time", "gpt2_tiny-bf16-8-1 pytorch compile max-autotune-no-cudagraphs")["batch"],
        4
    );
    assert_eq!(called.row("ranks", "gpt2-ranks-2 a killed rank")["ok"], true);
    let table = called.table();
    for part in [
        "bf16 GEMM 790 TFLOP/s, copy 4300 GB/s",
        "| gpt2_tiny | pytorch compile reduce-overhead (best) |",
        "- correctness: 4 of 4 rows are good",
        "Software 1:",
        "- driver: CUDA 13.0, /lib/libcuda.so.580.1",
        "cudnn",
    ] {
        assert!(table.contains(part), "`{part}` is not in {table}");
    }
    // What comes back.
    let files = fs::read_dir(&called.out).expect("the folder").count();
    assert!(files <= 7, "{files}");
    let archive = Command::new("tar").arg("-tzf").arg(called.out.join("carried.tar.gz")).output();
    let listed = String::from_utf8(archive.expect("tar").stdout).expect("names");
    assert!(listed.contains("tuning/gpt2_tiny-bf16-8-1.json"), "{listed}");
}

#[test]
fn a_stage_that_hangs_is_ended_with_what_it_started_and_the_next_call_goes_on() {
    let kit = Kit::new();
    let hangs = json!({"bert_tiny-bf16-8-1 --data": "hang", "gpt2-bf16 --data": "fail"});
    let first = kit.call("first", &["--deadline", "10"], &hangs);
    assert_eq!(first.code, Some(1), "{}", first.said);
    // As soon as that on a machine with nothing else to do.
    assert!(first.seconds < 20.0, "{}", first.seconds);
    let cut = first.row("first", "bert_tiny-bf16-8-1");
    assert_eq!((&cut["ok"], &cut["cut"]), (&json!(false), &json!(true)), "{cut}");
    let table = first.table();
    assert!(
        table.contains("**bert_tiny-bf16-8-1**: no end after") && table.contains("at the deadline"),
        "{table}"
    );
    assert!(table.contains("- time: 6 of 11 rows are good, 5 missing"), "{table}");
    assert_eq!(first.said.matches("- smoke: ").count(), 1, "the table is printed");
    // A row that failed names why; the other model of the stage still works.
    let failed = first.row("smoke", "gpt2-bf16 steps");
    assert_eq!(failed["note"], "exit code 1: error: something is wrong");
    let calls = kit.calls("first");
    let children: Vec<&str> = calls.iter().filter_map(|l| l.strip_prefix("child ")).collect();
    assert_eq!(children.len(), 1);
    for child in children {
        // What nobody waits for may stay as a zombie.
        let stat =
            fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_else(|_| " Z ".into());
        assert!(stat.contains(" Z "), "{child} still runs: {stat}");
    }

    let from = kit.path("first").display().to_string();
    fs::remove_file(kit.path("plans/gpt2_tiny-bf16-8-1/tuning.json")).expect("removed");
    let next = kit.call("next", &["--deadline", "120", "--from", &from], &json!({}));
    let calls = kit.calls("next").join("\n");
    // Good rows, and one that failed with the same kit, are not made again; the one that was cut is.
    assert!(
        !calls.contains("compare mlp-fp32") && !calls.contains("frit-run gpt2-bf16"),
        "{calls}"
    );
    assert_eq!(next.row("first", "bert_tiny-bf16-8-1")["ok"], true);
    assert_eq!(next.row("smoke", "gpt2-bf16 steps")["ok"], false);
    assert_eq!(next.code, Some(1));
    assert!(next.table().contains("- smoke: 2 of 4 rows are good"), "{}", next.table());
    // What the first call measured was there.
    let tuned =
        fs::read_to_string(kit.path("plans/gpt2_tiny-bf16-8-1/tuning.json")).expect("carried");
    assert!(tuned.contains("gpt2_tiny-bf16-8-1"), "{tuned}");

    // With another kit what failed is made again, and what was good is known to be of the other.
    kit.write_entries("def5678");
    let from = kit.path("next").display().to_string();
    let other = kit.call("other", &["--from", &from], &json!({}));
    assert_eq!(other.code, Some(0), "{}", other.said);
    let calls = kit.calls("other").join("\n");
    assert!(calls.contains("frit-run gpt2-bf16") && !calls.contains("compare mlp-fp32"), "{calls}");
    let table = other.table();
    assert!(table.contains("- smoke: 4 of 4 rows are good (some of abc1234)"), "{table}");
    let again = kit.call("again", &["smoke", "--from", &from, "--again", "mlp"], &json!({}));
    assert_eq!(again.code, Some(0), "{}", again.said);
    assert!(kit.calls("again").join("\n").contains("compare mlp-fp32"));
}

#[test]
fn rows_are_left_out_by_stage_and_name() {
    let kit = Kit::new();
    let arguments = ["smoke", "--without", "smoke gpt2", "--without", "fp32 kernels"];
    let called = kit.call("out", &arguments, &json!({}));
    assert_eq!(called.code, Some(0), "{}", called.said);
    for (stage, name) in [("machine", "pytorch"), ("smoke", "mlp-fp32 steps")] {
        assert_eq!(called.row(stage, name)["ok"], true, "{name}");
    }
    for name in ["mlp-fp32 kernels", "gpt2-bf16 kernels", "gpt2-bf16 steps"] {
        assert!(called.row("smoke", name).is_null(), "{name}");
    }
}

#[test]
fn rows_name_the_worst_tensor_and_nothing_follows_if_both_smoke_tests_fail() {
    let kit = Kit::new();
    let called =
        kit.call("out", &["--deadline", "60"], &json!({"mlp-fp32": "far", "gpt2-bf16": "far"}));
    assert_eq!(called.code, Some(1), "{}", called.said);
    let table = called.table();
    for part in [
        "**Stopped**: both smoke tests failed; nothing else was run.",
        "k1 (add gelu) in task `gelu_3`: error 2.5e-01, allowed 1.0e-04, `h3` at [1, 7] is 2.5 instead of 2.0",
        "most in `layer.weight`: 2.5e-01 of its largest at [1, 1], 5.0 instead of 4.0",
    ] {
        assert!(table.contains(part), "`{part}` is not in {table}");
    }
    assert!(
        called.order().iter().all(|stage| ["machine", "smoke"].contains(stage)),
        "{}",
        called.said
    );
}

#[test]
fn a_signal_ends_it_with_the_table_written() {
    let kit = Kit::new();
    let child = kit.start("out", &[], &json!({"mlp-fp32": "hang", "gpt2-bf16": "hang"}));
    let begin = Instant::now();
    while kit.calls("out").iter().filter(|l| l.starts_with("child ")).count() < 2 {
        assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", kit.calls("out"));
        std::thread::sleep(Duration::from_millis(50));
    }
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().expect("kill").success());
    let output = child.wait_with_output().expect("an end");
    assert_eq!(output.status.code(), Some(1));
    let table = fs::read_to_string(kit.path("out/gpu.md")).expect("the table");
    assert!(table.contains("**Stopped**: ended before all was done."), "{table}");
    assert!(table.contains("- machine: "), "{table}");
}
