//! GPU plans on a machine without one: every process reports it in one sentence with exit code 2, and none hangs.

use frit_runtime::device::cuda::doctor;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn workspace(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").join(path)
}

fn frit() -> Command {
    Command::new(env!("CARGO_BIN_EXE_frit"))
}

/// A plan for two GPUs.
fn compiled(dir: &Path) -> PathBuf {
    let plan = dir.join("plan");
    let mut compile = frit();
    compile.arg("compile").arg(workspace("tests/models/mlp/model.onnx"));
    compile.args(["--bind", "batch=4", "--set", "target.device=cuda", "--set", "sharding.ranks=2"]);
    let output = compile.arg("-o").arg(&plan).output().expect("starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    plan
}

/// Starts these ranks of so many, as torchrun would, and waits for their ends.
fn ranks(plan: &Path, ranks: &[usize], world_size: usize, timeout: &str) -> Vec<Output> {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port().to_string();
    drop(listener);
    let start = |rank: &usize| {
        let mut run = frit();
        run.arg("run").arg(plan).arg("--data").arg(workspace("tests/models/mlp/data.safetensors"));
        run.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
        run.env("WORLD_SIZE", world_size.to_string()).env("FRIT_TIMEOUT", timeout);
        run.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("starts")
    };
    let children: Vec<_> = ranks.iter().map(start).collect();
    children.into_iter().map(|c| c.wait_with_output().expect("ends")).collect()
}

/// The process ended with exit code 2 and one sentence that holds every part.
fn refused(output: &Output, parts: &[&str]) {
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert_eq!(message.trim_end().lines().count(), 1, "{message}");
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

#[test]
fn without_gpus_every_rank_ends_and_says_why() {
    let findings = doctor::examine(None).expect("no plan to refuse");
    if findings.findings[0].found.is_some() {
        eprintln!("SKIPPED: this machine has a driver");
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let plan = compiled(dir.path());
    // Both find no driver, or one hears of it from the other.
    for output in ranks(&plan, &[0, 1], 2, "60") {
        refused(&output, &["the NVIDIA driver is not found"]);
    }
    refused(&ranks(&plan, &[0], 2, "1")[0], &["rank 1 did not connect within 1 s"]);
    refused(&ranks(&plan, &[1], 2, "1")[0], &["rank 0 does not answer at 127.0.0.1"]);
    refused(&ranks(&plan, &[0], 1, "1")[0], &["the plan is for 2 ranks", "--nproc-per-node 2"]);
}
