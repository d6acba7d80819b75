//! Failing runs: what is reported before the first step, what ends a run with which exit code, and the files it leaves.

#![cfg(unix)]

mod tiny;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A compiled model, and a place for what runs of it write.
struct Place {
    dir: tempfile::TempDir,
    plan: PathBuf,
}

impl Place {
    fn new(ranks: usize, settings: &[&str]) -> Place {
        let dir = tempfile::tempdir().expect("a directory");
        let plan = tiny::compiled(dir.path(), ranks, settings);
        Place { dir, plan }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn run(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_frit"));
        command.arg("run").arg(&self.plan).current_dir(self.dir.path());
        if !args.contains(&"--data") {
            command.args(["--data", "data.safetensors"]);
        }
        command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs to the end.
    fn output(&self, args: &[&str]) -> Output {
        self.run(args).output().expect("starts")
    }

    /// The run fails with this exit code, and its message holds every part.
    fn fails(&self, code: i32, args: &[&str], parts: &[&str]) {
        expect(&self.output(args), code, parts);
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.file(folder)).expect("a directory");
        let name = |e: std::io::Result<std::fs::DirEntry>| {
            e.expect("an entry").file_name().into_string().expect("Unicode")
        };
        let mut names: Vec<String> = entries.map(name).collect();
        names.sort();
        names
    }
}

fn message(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn expect(output: &Output, code: i32, parts: &[&str]) {
    let message = message(output);
    assert_eq!(output.status.code(), Some(code), "{message}");
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
    assert!(!message.contains("panicked"), "{message}");
    assert!(message.matches("error[").count() <= 1, "{message}");
}

fn lines(path: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn wait_for(what: &str, is_there: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is_there() {
        assert!(begin.elapsed() < Duration::from_secs(120), "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Starts a process for each of two ranks.
fn two_ranks(place: &Place, args: &[&str]) -> Vec<Child> {
    let port = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.local_addr().expect("an address").port().to_string()
    };
    let rank = |rank: usize| {
        let mut command = place.run(args);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2").env("FRIT_TIMEOUT", "60");
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        command.spawn().expect("starts")
    };
    (0..2).map(rank).collect()
}

fn ended(children: Vec<Child>) -> Vec<Output> {
    children.into_iter().map(|c| c.wait_with_output().expect("ends")).collect()
}

#[test]
fn what_cannot_be_written_is_said_before_the_first_step() {
    let place = Place::new(1, &["optimizer.ema=0.9"]);
    std::fs::create_dir(place.file("folder")).expect("made");
    let before = place.names(".");
    let steps = ["--steps", "1000000000"];
    for option in
        ["--save", "--save-ema", "--dump-grads", "--metrics", "--trace", "--usage", "--numerics"]
    {
        for (path, reason) in [
            ("no/such/file", "the directory no/such does not exist"),
            ("folder", "is a directory"),
            ("data.safetensors/file", "data.safetensors/file"),
            ("data.safetensors", "--data"),
            ("/proc/nothing", "/proc/nothing"),
        ] {
            place.fails(2, &[&steps[..], &[option, path]].concat(), &[option, path, reason]);
        }
    }
    let same = ["--save", "a.safetensors", "--save-ema", "./a.safetensors"];
    place.fails(2, &[&steps[..], &same].concat(), &["--save-ema", "--save"]);
    for path in ["data.safetensors", "data.safetensors/checkpoints"] {
        place.fails(2, &[&steps[..], &["--checkpoint", path]].concat(), &["--checkpoint", path]);
    }
    let mut eval = Command::new(env!("CARGO_BIN_EXE_frit"));
    eval.arg("eval").arg(&place.plan).arg("--data").arg(place.file("data.safetensors"));
    let output = eval.args(["--dump-outputs", "/no/such/file"]).output().expect("starts");
    expect(&output, 2, &["--dump-outputs", "/no/such/file"]);
    assert_eq!(place.names("."), before);
}

#[test]
fn devices_links_and_pipes_are_written_as_what_they_are() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let place = Place::new(1, &[]);
    let plain = place.output(&["--steps", "2", "--save", "plain.safetensors"]);
    assert!(plain.status.success(), "{}", message(&plain));
    let saved = std::fs::read(place.file("plain.safetensors")).expect("saved");
    // As every new file of the person.
    std::fs::write(place.file("usual"), "").expect("written");
    let mode = |name: &str| {
        std::fs::metadata(place.file(name)).expect("a file").permissions().mode() & 0o777
    };
    assert_eq!(mode("plain.safetensors"), mode("usual"));
    assert_eq!(mode("plan/weights.safetensors"), mode("usual"));
    let piped = place.output(&["--steps", "2", "--save", "/dev/stdout"]);
    assert!(piped.status.success(), "{}", message(&piped));
    assert_eq!(piped.stdout, saved);
    assert!(message(&piped).contains("2 steps"), "{}", message(&piped));
    assert!(place.output(&["--steps", "2", "--save", "/dev/null"]).status.success());
    place.fails(2, &["--steps", "2", "--save", "/dev/full"], &["--save is lost", "/dev/full"]);
    // A link stays, whether there is something behind it or not yet.
    for target in ["plain.safetensors", "behind.safetensors"] {
        let link = place.file("link");
        symlink(target, &link).expect("a link");
        assert!(place.output(&["--steps", "2", "--save", "link"]).status.success());
        assert!(std::fs::symlink_metadata(&link).expect("a link").is_symlink());
        assert_eq!(std::fs::read(place.file(target)).expect("saved"), saved);
        std::fs::remove_file(&link).expect("removed");
    }
    assert!(Command::new("mkfifo").arg(place.file("pipe")).status().expect("starts").success());
    let child = place.run(&["--steps", "2", "--save", "pipe"]).spawn().expect("starts");
    assert_eq!(std::fs::read(place.file("pipe")).expect("piped"), saved);
    assert!(child.wait_with_output().expect("ends").status.success());
    // Metrics are worth less than the run.
    let output = place.output(&["--steps", "2", "--metrics", "/dev/full", "--save", "last"]);
    expect(&output, 0, &["warning: /dev/full cannot be written", "lacks 2 lines"]);
    assert_eq!(std::fs::read(place.file("last")).expect("saved"), saved);
}

#[test]
fn a_linker_that_is_not_there_is_named() {
    let place = Place::new(1, &[]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_frit"));
    command
        .env("CC", "/nowhere/cc")
        .args(["compile", "-o", "linked"])
        .current_dir(place.dir.path());
    command
        .args(["--bind", "batch=4"])
        .arg(format!("{}/../tests/models/mlp/model.onnx", env!("CARGO_MANIFEST_DIR")));
    let output = command.stdout(Stdio::piped()).stderr(Stdio::piped()).output().expect("starts");
    expect(&output, 2, &["E095", "/nowhere/cc", "install a C compiler"]);
    assert!(!place.file("linked").exists());
}

/// What is not finite in the examples from the 32nd on, of 64.
fn broken_data(place: &Place, name: &str) {
    tiny::write_data(&place.file(name), |x, i| if i >= 32 * 3 { f32::NAN } else { x });
}

#[test]
fn a_run_that_only_skips_steps_or_loses_its_numbers_fails() {
    for (ranks, settings) in [
        (1, &[][..]),
        (2, &["precision.compute=bf16", "run.accumulation=2"]),
        (2, &["precision.compute=fp16", "sharding.strategy=no_shard"]),
    ] {
        let place = Place::new(ranks, settings);
        tiny::write_data(&place.file("nan.safetensors"), |_, _| f32::NAN);
        let nan = ["--data", "nan.safetensors", "--metrics", "m.jsonl"];
        let parts = ["E106", "every step was skipped (5)", "--check-numerics", "5 of them skipped"];
        place.fails(1, &[&nan[..], &["--steps", "5"]].concat(), &parts);
        let limit = ["--steps", "1000000000", "--max-skipped", "7", "--save", "never"];
        let parts = ["the last 7 steps, up to step 6, were skipped"];
        place.fails(1, &[&nan[..], &limit].concat(), &parts);
        assert!(!place.file("never").exists());
        assert_eq!(lines(&place.file("m.jsonl")).len(), 12);
        place.fails(1, &[&nan[..], &["--steps", "5", "--check-numerics"]].concat(), &["E101"]);
        // By default it does not take forever either.
        let limit = ["--steps", "1000000000"];
        place.fails(1, &[&nan[..], &limit].concat(), &["the last 100 steps, up to step 99"]);
    }
}

#[test]
fn checkpoints_of_a_run_that_fails_are_those_from_before() {
    let place = Place::new(2, &[]);
    // 8 examples a step: four steps that are good, then only bad ones.
    broken_data(&place, "broken.safetensors");
    let args = [
        "--data",
        "broken.safetensors",
        "--steps",
        "1000",
        "--max-skipped",
        "3",
        "--checkpoint",
        "c",
        "--checkpoint-every",
        "2",
    ];
    place.fails(1, &args, &["the last 3 steps, up to step 6", "checkpoints from before are kept"]);
    let kept = ["latest", "lock", "step-00000002", "step-00000004", "step-00000006"];
    assert_eq!(place.names("c"), kept);
    // A rate that throws the parameters out of all bounds: no checkpoint of them is made.
    let args = [
        "--steps",
        "1000",
        "--checkpoint",
        "d",
        "--checkpoint-every",
        "1",
        "--keep",
        "1",
        "--save",
        "never",
    ];
    let rates = ["--set", "optimizer.lr=3e38", "--set", "optimizer.clip_grad_norm=0"];
    let output = place.output(&[&args[..], &rates].concat());
    expect(&output, 1, &["E106"]);
    assert!(!place.file("never").exists());
    let names = place.names("d");
    assert!(names.iter().filter(|n| n.starts_with("step-")).count() <= 1, "{names:?}");
    // On several processes all of them decide alike.
    let args = ["--data", "broken.safetensors", "--steps", "1000", "--max-skipped", "3"];
    for output in ended(two_ranks(&place, &args)) {
        expect(&output, 1, &["the last 3 steps, up to step 6"]);
    }
}

#[test]
fn a_directory_of_checkpoints_is_one_runs_at_a_time() {
    let place = Place::new(2, &[]);
    let args = ["--steps", "100000000", "--checkpoint", "c", "--checkpoint-every", "1", "--keep"];
    let first = [&args[..], &["2", "--metrics", "m.jsonl"]].concat();
    let mut child = place.run(&first).spawn().expect("starts");
    wait_for("a checkpoint", || place.file("c/latest").exists());
    let run = lines(&place.file("m.jsonl"))[0]["run"].as_str().expect("a text").to_string();
    let parts = [run.as_str(), &format!("process {}", child.id()), "another directory"];
    place.fails(2, &["--steps", "9", "--checkpoint", "c", "--resume"], &parts);
    for output in ended(two_ranks(&place, &["--steps", "9", "--checkpoint", "c", "--resume"])) {
        assert_eq!(output.status.code(), Some(2), "{}", message(&output));
    }
    // A lock ends with its process.
    child.kill().expect("killed");
    child.wait().expect("ends");
    place.fails(2, &["--steps", "9", "--checkpoint", "c"], &["--resume"]);
    let done = lines(&place.file("m.jsonl")).len() + 3;
    let steps = done.to_string();
    let args = ["--steps", &steps, "--checkpoint", "c", "--resume", "--metrics", "m.jsonl"];
    let output = place.output(&args);
    expect(&output, 0, &[]);
    let metrics = lines(&place.file("m.jsonl"));
    assert_eq!(metrics.len(), done);
    assert_ne!(metrics[done - 1]["run"], run.as_str());
    assert!(metrics[done - 1]["wall_time"].as_f64() >= metrics[0]["wall_time"].as_f64());
    // Two processes share the lock of rank 0.
    let steps = (done + 2).to_string();
    for output in ended(two_ranks(&place, &["--steps", &steps, "--checkpoint", "c", "--resume"])) {
        expect(&output, 0, &[]);
    }
}

#[test]
fn checkpoints_without_latest_are_found() {
    let place = Place::new(2, &[]);
    let args = ["--checkpoint", "c", "--checkpoint-every", "2", "--metrics", "m.jsonl"];
    expect(&place.output(&[&args[..], &["--steps", "6"]].concat()), 0, &[]);
    let latest = place.file("c/latest");
    std::fs::remove_file(&latest).expect("removed");
    place.fails(2, &[&args[..], &["--steps", "8"]].concat(), &["--resume", "another directory"]);
    // The newest was not copied as a whole.
    std::fs::remove_file(place.file("c/step-00000006/rank-00000.safetensors")).expect("removed");
    let output = place.output(&[&args[..], &["--steps", "8", "--resume"]].concat());
    expect(&output, 0, &["`latest`", "step-00000004"]);
    assert_eq!(std::fs::read_to_string(&latest).expect("latest"), "step-00000008\n");
    let steps: Vec<_> = lines(&place.file("m.jsonl")).iter().map(|l| l["step"].as_u64()).collect();
    assert_eq!(steps, (0..8).map(Some).collect::<Vec<_>>());
    for step in [2, 4, 6, 8] {
        let file = place.file(&format!("c/step-{step:08}/index.json"));
        let _ = std::fs::remove_file(file);
    }
    std::fs::remove_file(&latest).expect("removed");
    let parts = ["no complete checkpoint"];
    place.fails(2, &[&args[..], &["--steps", "9", "--resume"]].concat(), &parts);
}

#[test]
fn lines_of_two_runs_are_told_apart() {
    let place = Place::new(1, &[]);
    let args = ["--steps", "2", "--metrics", "m.jsonl"];
    assert_eq!(message(&place.output(&args)), "");
    expect(&place.output(&args), 0, &["m.jsonl has lines of an earlier run"]);
    let found = lines(&place.file("m.jsonl"));
    assert_eq!(found.len(), 4);
    assert_eq!(found[0]["run"], found[1]["run"]);
    assert_ne!(found[1]["run"], found[2]["run"]);
}

/// Compiles the model of a place again, into another plan.
fn compile(place: &Place, plan: &str, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_frit"));
    command.arg("compile").arg(place.file("model.json")).arg("-o").arg(place.file(plan));
    command.args(["--set", "loss.kind=mse"]).args(args);
    command.output().expect("starts")
}

#[test]
fn memory_that_does_not_fit_is_said_with_sizes() {
    let place = Place::new(1, &[]);
    let output = compile(&place, "huge", &["--bind", "batch=10000000000"]);
    assert!(output.status.success(), "{}", message(&output));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find(|l| l.starts_with("warning")).expect("a warning");
    for part in ["needed for 1 rank", "GiB", "smaller batch"] {
        assert!(line.contains(part), "{line}");
    }
    let run = |limit: &str| {
        let frit = env!("CARGO_BIN_EXE_frit");
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("{limit} exec {frit} run huge --data data.safetensors")]);
        shell.current_dir(place.dir.path()).output().expect("starts")
    };
    expect(&run(""), 2, &["needed for 1 rank", "GiB of memory", "smaller batch"]);
    expect(&run("ulimit -v 6000000;"), 2, &["needed for 1 rank", "ulimit -v"]);
    let small = compile(&place, "small", &["--bind", "batch=4"]);
    assert!(!String::from_utf8_lossy(&small.stdout).contains("warning"));
}

#[test]
fn settings_that_cannot_be_are_explained() {
    let place = Place::new(1, &[]);
    for (setting, parts) in [
        (
            "optimizer.kind=sgd",
            &["optimizer.kind", "compile it again with --set", "optimizer.lr"][..],
        ),
        ("run.accumulation=2", &["compile it again with --set run.accumulation"]),
        ("optimizer.lrr=1", &["did you mean `optimizer.lr`"]),
        ("nothing.like.this=1", &["--help-config"]),
        ("optimizer.lr=fast", &["optimizer.lr", "number"]),
    ] {
        place.fails(2, &["--set", setting], parts);
    }
    // A schedule that ends does so after its warmup, also with what a checkpoint sets.
    let ends = ["schedule.kind=cosine", "schedule.total_steps=10", "schedule.warmup_steps=2"];
    let place = Place::new(1, &ends);
    let set = |setting| ["--steps", "1", "--set", setting];
    place.fails(
        2,
        &set("schedule.total_steps=2"),
        &["`schedule.total_steps` cannot be 2", "warmup"],
    );
    let longer =
        place.output(&[&set("schedule.total_steps=90")[..], &["--checkpoint", "long"]].concat());
    expect(&longer, 0, &[]);
    let resumed = ["--steps", "2", "--checkpoint", "long", "--resume", "--set"];
    expect(&place.output(&[&resumed[..], &["schedule.warmup_steps=50"]].concat()), 0, &[]);
    place.fails(2, &[&resumed[..], &["schedule.warmup_steps=90"]].concat(), &["cannot be 90"]);
    let constant = Place::new(1, &["schedule.warmup_steps=2"]);
    expect(&constant.output(&set("schedule.warmup_steps=5")), 0, &[]);
    let place = Place::new(1, &[]);
    let zero = compile(&place, "zero", &["--bind", "batch=0"]);
    expect(&zero, 2, &["batch=0", "at least 1"]);
    let model = std::fs::read_to_string(place.file("model.json")).expect("the model");
    let zero = model.replace(r#""batch": null"#, r#""batch": 0"#);
    assert_ne!(zero, model);
    std::fs::write(place.file("model.json"), zero).expect("written");
    expect(&compile(&place, "zero", &[]), 2, &["`batch` is 0", "--bind batch=N"]);
    assert!(!place.file("zero").exists());
}

#[test]
fn the_only_output_is_what_the_loss_is_taken_of() {
    // It is called `y`, and nobody said so.
    let place = Place::new(1, &[]);
    let output = compile(&place, "plan", &["--bind", "batch=4"]);
    assert!(output.status.success(), "{}", message(&output));
    expect(&place.output(&["--steps", "2"]), 0, &[]);
    let wrong = compile(&place, "wrong", &["--bind", "batch=4", "--set", "loss.logits=z"]);
    expect(&wrong, 2, &["`z`", "`y`"]);
    let model = std::fs::read_to_string(place.file("model.json")).expect("the model");
    let two = model.strip_suffix(r#"["y"] }"#).expect("the model's outputs are last");
    let two = format!(r#"{two}["y", "a"] }}"#);
    std::fs::write(place.file("model.json"), two).expect("written");
    expect(&compile(&place, "wrong", &["--bind", "batch=4"]), 2, &["`y`", "`a`", "loss.logits"]);
}

#[test]
fn without_a_terminal_lines_say_how_far_it_is() {
    let place = Place::new(1, &[]);
    let mut child = place.run(&["--steps", "1000000000"]).spawn().expect("starts");
    let mut said = String::new();
    let error = child.stderr.as_mut().expect("piped");
    std::io::BufRead::read_line(&mut std::io::BufReader::new(error), &mut said).expect("a line");
    child.kill().expect("killed");
    child.wait().expect("ends");
    assert!(said.starts_with("step ") && said.contains(" of 1000000000, loss "), "{said}");
}

/// Writes parameters of the model, of which one element of `down` is `value`.
fn write_weights(path: &Path, value: f32) {
    let header = r#"{"up":{"dtype":"F32","shape":[3,5],"data_offsets":[0,60]},"down":{"dtype":"F32","shape":[5,2],"data_offsets":[60,100]}}"#;
    let element = |i: usize| if i == 15 + 7 { value } else { 0.25 };
    let body: Vec<u8> = (0..25).flat_map(|i| element(i).to_le_bytes()).collect();
    let len = (header.len() as u64).to_le_bytes();
    std::fs::write(path, [&len, header.as_bytes(), &body].concat()).expect("written");
}

#[test]
fn weights_that_are_not_finite_are_said_before_the_first_step() {
    let place = Place::new(2, &[]);
    for (value, said) in [(f32::NAN, "`down` (NaN in element 7)"), (f32::INFINITY, "(inf in ele")] {
        write_weights(&place.file("broken.safetensors"), value);
        let args = ["--weights", "broken.safetensors", "--metrics", "m.jsonl"];
        place.fails(2, &args, &["E100", "broken.safetensors", "1 not finite", said]);
        assert!(!place.file("m.jsonl").exists());
    }
    // A later file takes precedence.
    write_weights(&place.file("good.safetensors"), 0.5);
    let both = ["--weights", "broken.safetensors", "good.safetensors"];
    expect(&place.output(&both), 0, &[]);
    // Those of a model are said when it is compiled, and refused by runs.
    let models = format!("{}/../tests/models/mlp", env!("CARGO_MANIFEST_DIR"));
    let compile = |model: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_frit"));
        command.arg("compile").arg(model).args(["--bind", "batch=4", "-o"]).arg(place.file("mlp"));
        command.output().expect("starts")
    };
    let original = Path::new(&models).join("model.onnx");
    assert!(!message(&compile(&original)).contains("W031"));
    let weights = std::fs::read(place.file("mlp/weights.safetensors")).expect("weights");
    let (length, rest) = weights.split_first_chunk::<8>().expect("a header");
    let first = &rest[u64::from_le_bytes(*length) as usize..][..16];
    let mut model = std::fs::read(&original).expect("a model");
    let at = model.windows(16).position(|bytes| bytes == first).expect("the weight");
    model[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    let broken = place.file("broken.onnx");
    std::fs::write(&broken, &model).expect("written");
    expect(&compile(&broken), 0, &["W031", "is NaN in element 0", "--weights"]);
    for verb in ["run", "eval"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_frit"));
        command.arg(verb).arg(place.file("mlp"));
        command.arg("--data").arg(Path::new(&models).join("data.safetensors"));
        let output = command.output().expect("starts");
        expect(&output, 2, &["E100", "the initial value of", "is NaN in element 0", "--weights"]);
    }
    // A mask may be a parameter.
    model[at..at + 4].copy_from_slice(&f32::NEG_INFINITY.to_le_bytes());
    std::fs::write(&broken, &model).expect("written");
    expect(&compile(&broken), 0, &["W031", "is -inf in element 0", "params.frozen"]);
}

#[test]
fn a_run_without_any_gradient_fails() {
    let place = Place::new(2, &[]);
    tiny::write_data(&place.file("zero.safetensors"), |_, _| 0.0);
    let run = |steps| ["--data", "zero.safetensors", "--steps", steps];
    let parts = ["E106", "is zero in every step (10)", "loss.weight"];
    place.fails(1, &[&run("10")[..], &["--save", "saved"]].concat(), &parts);
    assert!(place.file("saved").exists());
    let early = ["the norm of the gradients is zero in the first 10 steps", "every step (12)"];
    place.fails(1, &run("12"), &early);
    // A few batches may have no gradient, and what is left of a run.
    expect(&place.output(&run("1")), 0, &["is zero in the only step"]);
    expect(&place.output(&run("9")), 0, &["is zero in all 9 steps", "loss.weight"]);
    assert!(!message(&place.output(&run("0"))).contains("gradients"));
    let first = ["--steps", "2", "--checkpoint", "c"];
    expect(&place.output(&first), 0, &[]);
    let resumed = [&run("5")[..], &["--checkpoint", "c", "--resume"]].concat();
    expect(&place.output(&resumed), 0, &["is zero in all 3 steps"]);
    let still = place.output(&["--steps", "2", "--set", "optimizer.lr=0"]);
    expect(&still, 0, &["optimizer.lr is 0: no step changes a parameter"]);
    let ends = ["schedule.kind=cosine", "schedule.total_steps=9", "schedule.min_lr=1e-6"];
    let ends = Place::new(1, &ends).output(&["--steps", "2", "--set", "optimizer.lr=0"]);
    assert!(ends.status.success() && !message(&ends).contains("optimizer.lr"), "{ends:?}");
    let weightless = ["--bind", "batch=4", "--set", "loss.weight=0"];
    expect(&compile(&place, "none", &weightless), 2, &["E053", "`loss.weight` is 0"]);
    let frozen = ["--bind", "batch=4", "--set", "params.trainable=[\"up\"]"];
    let frozen = [&frozen[..], &["--set", "params.frozen=[\"up\"]"]].concat();
    expect(&compile(&place, "none", &frozen), 2, &["E064", "of 2 parameters", "`down`: "]);
}

#[test]
fn settings_that_have_no_effect_are_warned_of() {
    let place = Place::new(1, &[]);
    let set = |settings: &[&'static str]| {
        let sets = settings.iter().flat_map(|s| ["--set", *s]);
        compile(&place, "other", &["--bind", "batch=4"].into_iter().chain(sets).collect::<Vec<_>>())
    };
    let output = set(&["optimizer.kind=sgd", "optimizer.momentum=0.9"]);
    let parts = [
        "W053",
        "--set optimizer.momentum: it has no effect",
        "`optimizer.kind` = \"sgd\"",
        "\"nesterov\"",
    ];
    expect(&output, 0, &parts);
    expect(&set(&["loss.label_smoothing=0.1"]), 0, &["W053", "\"cross_entropy\""]);
    let read = set(&["optimizer.kind=nesterov", "optimizer.momentum=0.8"]);
    assert!(!message(&read).contains("W053"));
    let none = set(&["optimizer.kind=sgd", "optimizer.momentum=0", "loss.label_smoothing=0"]);
    assert!(!message(&none).contains("W053"));
    // The configuration in a plan writes every key.
    let stored = place.file("other/source/train.toml");
    let again = ["--bind", "batch=4", "--config", stored.to_str().expect("UTF-8")];
    assert!(!message(&compile(&place, "again", &again)).contains("W053"));
}

#[test]
fn a_size_is_given_once() {
    let place = Place::new(1, &[]);
    let twice = compile(&place, "other", &["--bind", "batch=4", "--bind", "batch=8"]);
    expect(&twice, 2, &["E097", "`batch` two sizes, 4 and 8"]);
    let same = compile(&place, "other", &["--bind", "batch=4", "--bind", "batch=4"]);
    expect(&same, 0, &[]);
}

#[test]
fn links_are_followed_and_kept() {
    use std::os::unix::fs::symlink;
    let place = Place::new(1, &[]);
    let bind = ["--bind", "batch=4"];
    std::fs::create_dir(place.file("disk")).expect("made");
    symlink("disk/plan", place.file("link")).expect("linked");
    for path in ["link", "link/", "link"] {
        expect(&compile(&place, path, &bind), 0, &[]);
        assert!(place.file("link").is_symlink());
        assert_eq!(place.names("disk"), ["plan"]);
    }
    symlink("nowhere/plan", place.file("astray")).expect("linked");
    let parts = ["E091", "is a symbolic link to nowhere/plan", "create the folder"];
    expect(&compile(&place, "astray", &bind), 2, &parts);
    symlink("nowhere", place.file("gone")).expect("linked");
    for option in ["--checkpoint", "--tensorboard"] {
        place.fails(2, &[option, "gone"], &[option, "is a symbolic link to nowhere"]);
    }
    assert!(!place.file("nowhere").exists());
}

#[test]
fn data_of_another_kind_is_told_what_becomes_of_it() {
    let place = Place::new(1, &[]);
    for (name, remedy) in [
        ("texts.jsonl", "frit tokenize"),
        ("table.csv", "to_parquet"),
        ("table.csv.gz", "to_parquet"),
        ("batch.pt", "safetensors.torch.save_file"),
        ("arrays.pkl", "numpy.savez"),
    ] {
        std::fs::write(place.file(name), "{}").expect("written");
        place.fails(2, &["--data", name], &[name, "unknown kind of data", remedy]);
    }
}
