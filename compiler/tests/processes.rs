//! One plan over several processes: bit-identical to threads, and a rank that dies, hangs or has another plan ends the
//! job on every rank, with an error that names it.

#![cfg(unix)]

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const RANKS: usize = 4;

fn workspace(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").join(path)
}

fn frit() -> Command {
    Command::new(env!("CARGO_BIN_EXE_frit"))
}

/// Compiles the mlp for so many ranks.
fn compiled(dir: &Path, name: &str, more: &[&str]) -> PathBuf {
    let plan = dir.join(name);
    let mut compile = frit();
    compile.arg("compile").arg(workspace("tests/models/mlp/model.onnx"));
    compile.args(["--bind", "batch=4", "--set", "precision.compute=fp32", "-o"]).arg(&plan);
    compile.args(["--set", &format!("sharding.ranks={RANKS}")]);
    more.iter().for_each(|setting| {
        compile.args(["--set", setting]);
    });
    let output = compile.output().expect("starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    plan
}

fn run(plan: &Path, args: &[&str]) -> Command {
    command("run", plan, args)
}

/// `frit run` or `frit eval` on the mlp's data.
fn command(name: &str, plan: &Path, args: &[&str]) -> Command {
    let mut command = frit();
    command.arg(name).arg(plan).arg("--data").arg(workspace("tests/models/mlp/data.safetensors"));
    command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A port that nothing listened at a moment ago.
fn free_port() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port().to_string()
}

/// Starts a process for every rank, as torchrun would, with so many seconds of patience.
fn start(plans: [&Path; RANKS], timeout: &str, args: &[&str]) -> Vec<Child> {
    let port = free_port();
    let rank = |(rank, plan)| as_rank(rank, run(plan, args), timeout, &port);
    plans.into_iter().enumerate().map(rank).collect()
}

/// Starts a process as one of several.
fn as_rank(rank: usize, mut command: Command, timeout: &str, port: &str) -> Child {
    command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
    command.env("WORLD_SIZE", RANKS.to_string()).env("FRIT_TIMEOUT", timeout);
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port);
    command.spawn().expect("starts")
}

fn ended(children: Vec<Child>) -> Vec<Output> {
    children.into_iter().map(|c| c.wait_with_output().expect("ends")).collect()
}

fn message(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Steps and losses without timings.
fn losses(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).expect("metrics");
    text.lines().map(|l| l.split("\"tokens_or").next().expect("a part").to_string()).collect()
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn processes_train_as_threads_do() {
    let dir = tempfile::tempdir().expect("a directory");
    for (name, strategy) in [
        ("full", &["sharding.strategy=full_shard"][..]),
        ("none", &["sharding.strategy=no_shard"]),
        ("hybrid", &["sharding.strategy=hybrid_shard", "sharding.shard_group=2"]),
    ] {
        let plan = compiled(dir.path(), name, strategy);
        let file = |kind: &str| dir.path().join(format!("{name}-{kind}"));
        let (threads, processes) = (file("threads.jsonl"), file("processes.jsonl"));
        let (saved, saved_too) = (file("a.safetensors"), file("b.safetensors"));
        let steps = ["--steps", "6"];
        let args = |metrics, save| {
            [&steps[..], &["--metrics", text(metrics), "--save", text(save)]].concat()
        };
        let output = run(&plan, &args(&threads, &saved)).output().expect("starts");
        assert!(output.status.success(), "{}", message(&output));
        let outputs = ended(start([&plan; RANKS], "120", &args(&processes, &saved_too)));
        for output in &outputs {
            assert!(output.status.success(), "{}", message(output));
        }
        // One of them speaks.
        assert!(!outputs[0].stdout.is_empty());
        assert!(outputs[1..].iter().all(|o| o.stdout.is_empty()));
        assert_eq!(losses(&threads), losses(&processes), "{name}");
        let read = |path: &Path| std::fs::read(path).expect("parameters");
        assert_eq!(read(&saved), read(&saved_too), "{name}");
    }
}

#[test]
fn only_rank_0_need_save_what_every_rank_has() {
    let dir = tempfile::tempdir().expect("a directory");
    let saved = dir.path().join("saved.safetensors");
    for (strategy, succeeds) in [("no_shard", true), ("full_shard", false)] {
        let setting = format!("sharding.strategy={strategy}");
        let plan = compiled(dir.path(), strategy, &[&setting]);
        let port = free_port();
        let rank = |r: usize| {
            let save: &[&str] = match r {
                0 => &["--save", text(&saved), "--trained-only"],
                _ => &[],
            };
            as_rank(r, run(&plan, &[&["--steps", "2"], save].concat()), "60", &port)
        };
        for output in ended((0..RANKS).map(rank).collect()) {
            let said = message(&output);
            assert_eq!(output.status.success(), succeeds, "{strategy}: {said}");
            assert!(succeeds || said.contains("--save is not given on rank"), "{said}");
        }
        assert_eq!(saved.exists(), succeeds, "{strategy}");
        // It is not there for the next.
        let _ = std::fs::remove_file(&saved);
    }
}

#[test]
fn processes_evaluate_as_threads_do() {
    let dir = tempfile::tempdir().expect("a directory");
    let plan = compiled(dir.path(), "plan", &[]);
    let dumped = |name: &str| dir.path().join(name);
    let args = |path| ["--dump-outputs", text(path)];
    let (threads, processes) = (dumped("a.safetensors"), dumped("b.safetensors"));
    let output = command("eval", &plan, &args(&threads)).output().expect("starts");
    assert!(output.status.success(), "{}", message(&output));
    let port = free_port();
    let rank = |rank| as_rank(rank, command("eval", &plan, &args(&processes)), "120", &port);
    let outputs = ended((0..RANKS).map(rank).collect());
    for output in &outputs {
        assert!(output.status.success(), "{}", message(output));
    }
    assert_eq!(outputs[0].stdout, output.stdout);
    assert!(String::from_utf8_lossy(&output.stdout).contains("loss"));
    assert!(outputs[1..].iter().all(|o| o.stdout.is_empty()));
    let read = |path: &Path| std::fs::read(path).expect("outputs");
    assert_eq!(read(&threads), read(&processes));
}

#[test]
fn checkpoints_of_processes_are_those_of_threads() {
    let dir = tempfile::tempdir().expect("a directory");
    let plan = compiled(dir.path(), "plan", &[]);
    let (ckpt, metrics) = (dir.path().join("ckpt"), dir.path().join("m.jsonl"));
    let whole = dir.path().join("whole.jsonl");
    let args = |steps| {
        let checkpoint = ["--checkpoint", text(&ckpt), "--checkpoint-every", "2", "--resume"];
        [&["--steps", steps, "--metrics", text(&metrics)], &checkpoint[..]].concat()
    };
    for output in ended(start([&plan; RANKS], "120", &args("5"))) {
        assert!(output.status.success(), "{}", message(&output));
    }
    let output = run(&plan, &args("7")).output().expect("starts");
    assert!(output.status.success(), "{}", message(&output));
    for output in ended(start([&plan; RANKS], "120", &args("9"))) {
        assert!(output.status.success(), "{}", message(&output));
    }
    let output = run(&plan, &["--steps", "9", "--metrics", text(&whole)]).output().expect("starts");
    assert!(output.status.success(), "{}", message(&output));
    assert_eq!(losses(&metrics), losses(&whole));
}

/// Waits until the run has written a line of metrics.
fn wait_for_steps(metrics: &Path) {
    let begin = Instant::now();
    while std::fs::read_to_string(metrics).unwrap_or_default().lines().count() < 2 {
        assert!(begin.elapsed() < Duration::from_secs(120), "no steps");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Sends a signal to rank 2 of a run; every other rank must end by itself, naming it and a collective.
fn rank_2_gets(signal: &str, parts: &[&str]) {
    let dir = tempfile::tempdir().expect("a directory");
    let plan = compiled(dir.path(), "plan", &[]);
    let metrics = dir.path().join("m.jsonl");
    let args = ["--steps", "1000000", "--metrics", text(&metrics)];
    let mut children = start([&plan; RANKS], "5", &args);
    wait_for_steps(&metrics);
    let id = children[2].id().to_string();
    assert!(Command::new("kill").args([signal, &id]).status().expect("kill").success());
    let mut victim = children.remove(2);
    let begin = Instant::now();
    for output in ended(children) {
        let message = message(&output);
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        let collective = ["all_gather", "reduce_scatter", "all_reduce"];
        assert!(collective.iter().any(|c| message.contains(c)), "{message}");
    }
    assert!(begin.elapsed() < Duration::from_secs(60), "it hangs");
    // It may be stopped, not dead.
    let _ = victim.kill();
    victim.wait().expect("ends");
}

#[test]
fn a_rank_that_dies_ends_the_job() {
    rank_2_gets("-KILL", &["rank 2 ended"]);
}

#[test]
fn a_rank_that_hangs_ends_the_job() {
    rank_2_gets("-STOP", &["rank 2 did not answer within 5 s"]);
}

#[test]
fn what_does_not_fit_together_is_refused_by_name() {
    let dir = tempfile::tempdir().expect("a directory");
    let (plan, other) =
        (compiled(dir.path(), "plan", &[]), compiled(dir.path(), "b", &["run.seed=1"]));
    for output in ended(start([&plan, &plan, &other, &plan], "10", &["--steps", "1"])) {
        assert_eq!(output.status.code(), Some(2));
        let message = message(&output);
        assert!(
            message.contains("rank 2 runs another plan") || message.contains("rank 0"),
            "{message}"
        );
    }
    // Ranks that would wait for each other.
    let port = free_port();
    let rank = |r: usize| {
        let steps = if r == 2 { "5" } else { "3" };
        as_rank(r, run(&plan, &["--steps", steps]), "60", &port)
    };
    let begin = Instant::now();
    let outputs = ended((0..RANKS).map(rank).collect());
    assert!(begin.elapsed() < Duration::from_secs(30), "they wait");
    assert!(outputs.iter().all(|output| output.status.code() == Some(2)));
    for said in outputs.iter().map(message) {
        assert!(said.contains("--steps is 5 on rank 2 and 3 on rank 0"), "{said}");
    }
    // As many processes as the plan has ranks.
    let mut two = run(&plan, &["--steps", "1"]);
    two.env("RANK", "0").env("LOCAL_RANK", "0").env("WORLD_SIZE", "2");
    let output = two.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", free_port()).output();
    let output = output.expect("starts");
    assert_eq!(output.status.code(), Some(2));
    let found = message(&output);
    assert!(found.contains("4 ranks") && found.contains("2 processes"), "{found}");
    // A rank that does not come.
    let mut alone = run(&plan, &["--steps", "1"]);
    alone
        .env("FRIT_TIMEOUT", "1")
        .env("RANK", "0")
        .env("LOCAL_RANK", "0")
        .env("WORLD_SIZE", RANKS.to_string());
    let output = alone.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", free_port()).output();
    let output = output.expect("starts");
    assert_eq!(output.status.code(), Some(2));
    assert!(message(&output).contains("did not connect within 1 s"), "{}", message(&output));
}
