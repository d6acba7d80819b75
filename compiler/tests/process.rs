//! Tests of the built program: exit codes, one clear message on bad input, no partial output, and files left after a kill.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

fn workspace(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").join(path)
}

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_frit"))
}

fn frit<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> Output {
    program().args(args).output().expect("the program starts")
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// The program exits with 2, and its one message holds every part.
fn refused(args: &[&str], parts: &[&str]) {
    let output = frit(args);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
    for part in parts {
        assert!(message.contains(part), "{args:?}: `{part}` is not in: {message}");
    }
    assert!(!message.contains("panicked"), "{message}");
    assert_eq!(message.matches("error[").count(), 1, "one error: {message}");
}

/// As [`refused`], for a compilation that must leave nothing behind.
fn not_compiled(dir: &Path, model: &Path, more: &[&str], parts: &[&str]) {
    let out = dir.join("plan");
    let args = [&["compile", text(model), "-o", text(&out)], more].concat();
    refused(&args, parts);
    let left: Vec<_> = std::fs::read_dir(dir)
        .expect("the directory")
        .map(|e| e.expect("an entry").file_name().into_string().expect("UTF-8"))
        .filter(|name| name.starts_with("plan"))
        .collect();
    assert_eq!(left, Vec::<String>::new(), "something was left");
}

/// ONNX by hand: length-delimited fields and varints.
fn field(number: u64, content: impl AsRef<[u8]>) -> Vec<u8> {
    let content = content.as_ref();
    [varint(number << 3 | 2), varint(content.len() as u64), content.to_vec()].concat()
}

fn integer(number: u64, value: u64) -> Vec<u8> {
    [varint(number << 3), varint(value)].concat()
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
    out
}

fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> Vec<u8> {
    let names = |number, names: &[&str]| names.iter().flat_map(|n| field(number, n)).collect();
    let (inputs, outputs): (Vec<u8>, Vec<u8>) = (names(1, inputs), names(2, outputs));
    field(1, [inputs, outputs, field(3, format!("{op}_node")), field(4, op)].concat())
}

/// An `f32[2, 2]` graph input or output.
fn value(number: u64, name: &str) -> Vec<u8> {
    let dim = field(1, integer(1, 2));
    let tensor = [integer(1, 1), field(2, [dim.clone(), dim].concat())].concat();
    field(number, [field(1, name), field(2, field(1, tensor))].concat())
}

fn model(nodes: &[Vec<u8>], initializers: &[Vec<u8>]) -> Vec<u8> {
    let weights: Vec<u8> = initializers.iter().flat_map(|t| field(5, t)).collect();
    let (input, output) = (value(11, "x"), value(12, "logits"));
    let graph = [nodes.concat(), field(2, "g"), weights, input, output].concat();
    [integer(1, 9), field(7, graph), field(8, integer(2, 18))].concat()
}

#[test]
fn bad_models_end_in_one_sentence_and_leave_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let put = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).expect("written");
        path
    };
    let mlp = std::fs::read(workspace("tests/models/mlp/model.onnx")).expect("the model");
    let cut = put("cut.onnx", &mlp[..mlp.len() * 2 / 3]);
    not_compiled(dir.path(), &cut, &["--bind", "batch=4"], &["cut.onnx", "complete"]);

    let cycle = model(&[node("Add", &["x", "b"], &["a"]), node("Relu", &["a"], &["b"])], &[]);
    let cycle = [cycle.clone(), vec![]].concat();
    not_compiled(dir.path(), &put("cycle.onnx", &cycle), &[], &["cycle"]);

    let unknown = model(&[node("Frobnicate", &["x"], &["logits"])], &[]);
    let parts = ["Frobnicate", "--list-ops"];
    not_compiled(dir.path(), &put("unknown.onnx", &unknown), &[], &parts);

    let place = [field(1, "location"), field(2, "weights.bin")].concat();
    let weight = [integer(1, 2), integer(1, 2), integer(2, 1), field(8, "w"), field(13, place)];
    let external = [weight.concat(), integer(14, 1)].concat();
    let missing = model(&[node("MatMul", &["x", "w"], &["logits"])], &[external]);
    not_compiled(dir.path(), &put("external.onnx", &missing), &[], &["weights.bin"]);

    let mlp = workspace("tests/models/mlp/model.onnx");
    not_compiled(dir.path(), &mlp, &[], &["--bind", "batch"]);
    let toml = put("train.toml", b"[optimizer]\nlearning_rate = 1.0\n");
    let config = ["--bind", "batch=4", "--config", text(&toml)];
    not_compiled(dir.path(), &mlp, &config, &["learning_rate"]);
    not_compiled(dir.path(), &dir.path().join("no.onnx"), &[], &["no.onnx"]);
    not_compiled(dir.path(), &put("empty.onnx", b""), &[], &["empty.onnx"]);
}

/// Compiles the mlp for a batch of 16 on `ranks` ranks.
fn compiled(dir: &Path, ranks: usize) -> PathBuf {
    let (mlp, plan) = (workspace("tests/models/mlp/model.onnx"), dir.join("plan"));
    let (bind, ranks) = (format!("batch={}", 16 / ranks), format!("sharding.ranks={ranks}"));
    let args = ["compile", text(&mlp), "--bind", &bind, "--set", &ranks, "-o", text(&plan)];
    let output = frit(&args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    plan
}

fn data() -> PathBuf {
    workspace("tests/models/mlp/data.safetensors")
}

/// A safetensors file of one tensor for each name, dtype and shape, all zero.
fn write_zeros(path: &Path, tensors: &[(&str, &str, usize, &[usize])]) {
    let (mut header, mut at) = (String::from("{"), 0);
    for (i, (name, dtype, size, shape)) in tensors.iter().enumerate() {
        let end = at + size * shape.iter().product::<usize>();
        let comma = if i > 0 { "," } else { "" };
        header += &format!(
            r#"{comma}"{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{at},{end}]}}"#
        );
        at = end;
    }
    header += "}";
    let len = (header.len() as u64).to_le_bytes();
    std::fs::write(path, [&len[..], header.as_bytes(), &vec![0; at]].concat()).expect("written");
}

#[test]
fn bad_data_and_damaged_plans_end_in_one_sentence() {
    let dir = tempfile::tempdir().expect("a directory");
    let plan = compiled(dir.path(), 2);
    let run = |data: &Path| {
        vec!["run".to_string(), text(&plan).into(), "--data".into(), text(data).into()]
    };
    let refuse = |data: &Path, parts: &[&str]| {
        let args = run(data);
        refused(&args.iter().map(String::as_str).collect::<Vec<_>>(), parts);
    };
    let file = dir.path().join("data.safetensors");
    write_zeros(&file, &[("x", "F64", 8, &[32, 784]), ("labels", "I64", 8, &[32])]);
    refuse(&file, &["`x`", "f32"]);
    write_zeros(&file, &[("x", "F32", 4, &[15, 784]), ("labels", "I64", 8, &[15])]);
    refuse(&file, &["15", "16"]);
    write_zeros(&file, &[("x", "F32", 4, &[32, 784])]);
    refuse(&file, &["labels"]);
    std::fs::write(&file, b"no safetensors").expect("written");
    refuse(&file, &["data.safetensors"]);
    refuse(&dir.path().join("none.safetensors"), &["none.safetensors"]);

    let json = plan.join("plan.json");
    let good = std::fs::read_to_string(&json).expect("the plan");
    let version = good.replacen("\"format_version\": ", "\"format_version\": 999", 1);
    assert_ne!(version, good);
    for (broken, parts) in [
        (version.as_str(), &["999"][..]),
        (&good[..good.len() / 2], &["plan.json"]),
        ("", &["plan.json"]),
    ] {
        std::fs::write(&json, broken).expect("written");
        refuse(&data(), parts);
        refused(&["inspect", text(&plan)], parts);
    }
    std::fs::write(&json, &good).expect("written");
    for name in ["kernels/kernels.so", "weights.safetensors"] {
        let path = plan.join(name);
        let good = std::fs::read(&path).expect("the file");
        std::fs::write(&path, &good[..good.len() / 2]).expect("written");
        refuse(&data(), &[name.rsplit('/').next().expect("a name")]);
        std::fs::remove_file(&path).expect("removed");
        refuse(&data(), &[name.rsplit('/').next().expect("a name")]);
        std::fs::write(&path, &good).expect("written");
    }
    refused(&["inspect", text(dir.path())], &["plan.json"]);
}

#[test]
fn a_plan_runs_wherever_it_is_moved() {
    let dir = tempfile::tempdir().expect("a directory");
    let plan = compiled(dir.path(), 2);
    let moved = dir.path().join("some where").join("else");
    std::fs::create_dir_all(moved.parent().expect("a parent")).expect("created");
    std::fs::rename(&plan, &moved).expect("moved");
    let data = data();
    let args = ["run", text(&moved), "--data", text(&data), "--steps", "2"];
    let output = frit(&args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // The program for nodes without the compiler.
    let lean = Path::new(env!("CARGO_BIN_EXE_frit")).with_file_name("frit-run");
    assert!(lean.exists(), "frit-run is not built; `cargo test --workspace` builds it");
    let output = Command::new(lean).args(&args[1..]).output().expect("the program starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("loss "));
}

#[cfg(unix)]
#[test]
fn installing_brings_man_pages_and_completions() {
    let dir = tempfile::tempdir().expect("a directory");
    let built = Path::new(env!("CARGO_BIN_EXE_frit")).parent().expect("a folder");
    let install = |from: &Path| {
        let arguments = [from, dir.path()];
        Command::new(workspace(".ci/install")).args(arguments).output().expect("bash runs")
    };
    let output = install(dir.path());
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("`make build` builds it"));
    let output = install(built);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let read = |path: &str| std::fs::read_to_string(dir.path().join(path)).expect(path);
    for page in ["frit", "frit-compile", "frit-run", "frit-check-gradients", "frit-run-compare"] {
        let page = read(&format!("share/man/man1/{page}.1"));
        assert!(page.starts_with(".ie") && page.contains("Example"), "{page}");
    }
    let words = |line: &str| {
        // What bash offers for the last word.
        let script = format!(
            "source share/bash-completion/completions/frit; COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _frit frit \"${{COMP_WORDS[-1]}}\" \"${{COMP_WORDS[-2]}}\"; echo \"${{COMPREPLY[@]}}\""
        );
        let output = Command::new("bash").args(["-c", &script]).current_dir(dir.path()).output();
        String::from_utf8(output.expect("bash runs").stdout).expect("UTF-8")
    };
    assert_eq!(words("frit comp").trim(), "compile completions");
    assert!(words("frit compile --prec").trim().is_empty());
    assert_eq!(words("frit compile --conf").trim(), "--config");
    assert!(read("share/zsh/site-functions/_frit-run").starts_with("#compdef frit-run"));
    assert!(read("share/fish/vendor_completions.d/frit.fish").contains("check-gradients"));
    let installed = Command::new(dir.path().join("bin/frit")).arg("--version").output();
    assert!(installed.expect("it runs").status.success());
}

#[cfg(unix)]
#[test]
fn an_interrupted_run_ends_at_once_with_complete_metrics() {
    let dir = tempfile::tempdir().expect("a directory");
    let plan = compiled(dir.path(), 2);
    for signal in ["-INT", "-KILL"] {
        let metrics = dir.path().join(format!("metrics{signal}.jsonl"));
        let data = data();
        let args = ["run", text(&plan), "--data", text(&data), "--steps", "10000000"];
        let mut child =
            program().args(args).arg("--metrics").arg(&metrics).spawn().expect("starts");
        let lines = || std::fs::read_to_string(&metrics).unwrap_or_default();
        let begin = Instant::now();
        while lines().lines().count() < 3 {
            assert!(begin.elapsed() < Duration::from_secs(60), "no steps");
            std::thread::sleep(Duration::from_millis(10));
        }
        let id = child.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().expect("kill").success());
        let begin = Instant::now();
        let status = child.wait().expect("ends");
        assert!(begin.elapsed() < Duration::from_secs(10), "{signal}: it hangs");
        assert!(!status.success());
        let written = lines();
        assert!(written.ends_with('\n'), "a torn line");
        for (step, line) in written.lines().enumerate() {
            let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
            assert_eq!(line["step"], step);
        }
    }
}

#[cfg(unix)]
#[test]
fn a_killed_compilation_leaves_a_whole_plan_or_none() {
    let dir = tempfile::tempdir().expect("a directory");
    let model = workspace("tests/models/gpt2/model.onnx");
    for milliseconds in [5, 20, 40, 80, 160] {
        let plan = dir.path().join(format!("plan{milliseconds}"));
        let args = ["compile", text(&model), "--bind", "batch=2", "-o", text(&plan)];
        let mut child = program()
            .args(args)
            .stdout(std::process::Stdio::null())
            .spawn()
            .expect("the program starts");
        std::thread::sleep(Duration::from_millis(milliseconds));
        // It may have ended already.
        let _ = child.kill();
        child.wait().expect("ends");
        if plan.exists() {
            let output = frit(&["verify", text(&plan), "--quick"]);
            assert!(output.status.success(), "after {milliseconds} ms: a torn plan");
        }
    }
}
