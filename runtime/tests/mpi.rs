//! Ranks started by `mpirun`: bit-identical to threads, and the job ends if one of them dies or hangs.
//!
//! Needs the feature `mpi`, Open MPI's `mpirun`, and `frit` beside `frit-run` (`cargo build -p frit`), which
//! compiles the plan.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const RANKS: &str = "4";
const FRIT_RUN: &str = env!("CARGO_BIN_EXE_frit-run");

fn workspace(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").join(path)
}

/// Compiles the mlp for four ranks.
fn compiled(dir: &Path) -> PathBuf {
    let frit = Path::new(FRIT_RUN).with_file_name("frit");
    assert!(frit.exists(), "no {}: run `cargo build -p frit` first", frit.display());
    let plan = dir.join("plan");
    let mut compile = Command::new(frit);
    compile.arg("compile").arg(workspace("tests/models/mlp/model.onnx"));
    compile.args(["--bind", "batch=4", "--set", "precision.compute=fp32", "-o"]).arg(&plan);
    compile.args(["--set", &format!("sharding.ranks={RANKS}")]);
    let output = compile.output().expect("starts");
    assert!(output.status.success(), "{}", message(&output));
    plan
}

fn message(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn add_arguments(command: &mut Command, plan: &Path, args: &[&str]) {
    command.arg(plan).arg("--data").arg(workspace("tests/models/mlp/data.safetensors")).args(args);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
}

fn start(plan: &Path, args: &[&str]) -> Child {
    let mut command = Command::new("mpirun");
    // More ranks than cores, and a container's only user, are not what Open MPI expects.
    command.args(["--oversubscribe", "-n", RANKS]);
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command.env("FRIT_TIMEOUT", "5").arg(FRIT_RUN);
    add_arguments(&mut command, plan, args);
    command.spawn().expect("mpirun of Open MPI")
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
fn ranks_of_mpirun_train_as_threads_do() {
    let dir = tempfile::tempdir().expect("a directory");
    let plan = compiled(dir.path());
    let file = |name: &str| dir.path().join(name);
    let (threads, ranks) = (file("threads.jsonl"), file("ranks.jsonl"));
    let (saved, saved_too) = (file("a.safetensors"), file("b.safetensors"));
    let mut alone = Command::new(FRIT_RUN);
    let steps = |metrics, save| ["--steps", "6", "--metrics", metrics, "--save", save];
    add_arguments(&mut alone, &plan, &steps(text(&threads), text(&saved)));
    let output = alone.output().expect("starts");
    assert!(output.status.success(), "{}", message(&output));
    let output = start(&plan, &steps(text(&ranks), text(&saved_too))).wait_with_output();
    let output = output.expect("ends");
    assert!(output.status.success(), "{}", message(&output));
    assert_eq!(losses(&threads).len(), 6);
    assert_eq!(losses(&threads), losses(&ranks));
    let read = |path: &Path| std::fs::read(path).expect("parameters");
    assert_eq!(read(&saved), read(&saved_too));
}

/// The process of a rank, once the job has made steps.
fn process_of_rank(rank: &str, metrics: &Path) -> String {
    let begin = Instant::now();
    while std::fs::read_to_string(metrics).unwrap_or_default().lines().count() < 2 {
        assert!(begin.elapsed() < Duration::from_secs(120), "no steps");
        std::thread::sleep(Duration::from_millis(10));
    }
    let wanted = [format!("OMPI_COMM_WORLD_RANK={rank}"), text(metrics).to_string()];
    let is_it = |id: &str| {
        let read = |file: &str| std::fs::read(format!("/proc/{id}/{file}")).unwrap_or_default();
        let has = |file: &str, part: &str| {
            read(file).split(|b| *b == 0).any(|entry| entry == part.as_bytes())
        };
        has("environ", &wanted[0]) && has("cmdline", &wanted[1])
    };
    let processes = std::fs::read_dir("/proc").expect("/proc").flatten();
    let mut ids = processes.filter_map(|e| e.file_name().into_string().ok());
    ids.find(|id| id.parse::<u32>().is_ok() && is_it(id)).expect("the rank runs")
}

/// What the job says after rank 2 got a signal.
fn rank_2_gets(signal: &str) -> String {
    let dir = tempfile::tempdir().expect("a directory");
    let plan = compiled(dir.path());
    let metrics = dir.path().join("m.jsonl");
    let job = start(&plan, &["--steps", "1000000", "--metrics", text(&metrics)]);
    let victim = process_of_rank("2", &metrics);
    assert!(Command::new("kill").args([signal, &victim]).status().expect("kill").success());
    let begin = Instant::now();
    let output = job.wait_with_output().expect("ends");
    assert!(begin.elapsed() < Duration::from_secs(60), "it hangs");
    assert!(!output.status.success());
    message(&output)
}

#[test]
fn a_rank_that_dies_ends_the_job() {
    let said = rank_2_gets("-KILL");
    // By Open MPI, or by a rank that noticed it first.
    assert!(said.contains("process rank 2") || said.contains("rank 2 ended"), "{said}");
}

#[test]
fn a_rank_that_hangs_ends_the_job() {
    let said = rank_2_gets("-STOP");
    assert!(said.contains("rank 2 did not answer within 5 s"), "{said}");
    let collectives = ["all_gather", "reduce_scatter", "all_reduce"];
    assert!(collectives.iter().any(|c| said.contains(c)), "{said}");
}
