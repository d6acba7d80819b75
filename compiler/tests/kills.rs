//! Runs that are killed at random moments and resumed end with the metrics and parameters of an uninterrupted run.
//!
//! `FRIT_KILLS` sets the number of kills.

#![cfg(unix)]

mod tiny;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Kills, unless `FRIT_KILLS` says otherwise.
const KILLS: usize = 10;
const STEPS: usize = 40;

struct Training {
    dir: tempfile::TempDir,
}

impl Training {
    fn new() -> Training {
        let training = Training { dir: tempfile::tempdir().expect("a directory") };
        tiny::compiled(training.dir.path(), 2, &[]);
        training
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts or goes on with the run of this name.
    fn start(&self, name: &str, steps: usize) -> Child {
        let steps = steps.to_string();
        Command::new(env!("CARGO_BIN_EXE_frit"))
            .arg("run")
            .arg(self.file("plan"))
            .arg("--data")
            .arg(self.file("data.safetensors"))
            .args(["--steps", &steps, "--checkpoint-every", "1", "--keep", "2", "--resume"])
            .arg("--checkpoint")
            .arg(self.file(name))
            .arg("--metrics")
            .arg(self.file(&format!("{name}.jsonl")))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("starts")
    }

    /// Steps and losses, which must follow one another.
    fn losses(&self, name: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.file(&format!("{name}.jsonl"))).unwrap_or_default();
        let loss = |line: &str| line.split("\"tokens_or").next().expect("a part").to_string();
        text.lines().map(loss).collect()
    }

    /// The parameters of the latest checkpoint, every part of it verified.
    fn parameters(&self, name: &str) -> Vec<u8> {
        let out = self.file("exported.safetensors");
        let output = Command::new(env!("CARGO_BIN_EXE_frit"))
            .arg("export")
            .arg(self.file(name))
            .arg("--safetensors")
            .arg(&out)
            .output()
            .expect("starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        std::fs::read(out).expect("the file")
    }
}

#[test]
fn killed_at_any_moment_the_last_complete_checkpoint_is_intact() {
    let wanted = std::env::var("FRIT_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(KILLS);
    let training = Training::new();
    let begin = Instant::now();
    assert!(training.start("whole", STEPS).wait().expect("ends").success());
    let (losses, parameters) = (training.losses("whole"), training.parameters("whole"));
    // From before the first checkpoint to after the last.
    let window = (begin.elapsed().as_millis() as u64).max(50);
    assert_eq!(losses.len(), STEPS);
    let (mut random, mut kills, mut run) = (fastrand::Rng::with_seed(17), 0, 0);
    while kills < wanted {
        run += 1;
        let name = format!("run{run}");
        loop {
            let mut child = training.start(&name, STEPS);
            let left = wanted - kills;
            if left > 0 {
                std::thread::sleep(Duration::from_millis(random.u64(..window)));
                // It may have ended already.
                let _ = child.kill();
            }
            let output = child.wait_with_output().expect("ends");
            if output.status.success() {
                break;
            }
            let message = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.code().is_none(), "not the kill: {message}");
            kills += 1;
            if training.file(&name).join("latest").exists() {
                training.parameters(&name);
            }
        }
        assert_eq!(training.losses(&name), losses, "after {kills} kills");
        assert_eq!(training.parameters(&name), parameters, "after {kills} kills");
    }
}

#[test]
fn a_plan_that_is_replaced_is_whole_whenever_the_compiler_is_killed() {
    let wanted = std::env::var("FRIT_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(KILLS);
    let training = Training::new();
    let plan = training.file("plan");
    let text = || std::fs::read_to_string(plan.join("plan.json")).expect("a plan");
    let (old, begin) = (text(), Instant::now());
    let replace = |seed: usize| {
        let seed = format!("run.seed={seed}");
        let mut compile = tiny::compile(training.dir.path(), 2, &[&seed]);
        compile.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("starts")
    };
    assert!(replace(1).wait().expect("ends").success());
    assert_ne!(text(), old, "it was replaced");
    let window = (begin.elapsed().as_millis() as u64 * 5 / 4).max(20);
    let (mut random, mut kills) = (fastrand::Rng::with_seed(29), 0);
    for seed in 2.. {
        let mut child = replace(seed);
        std::thread::sleep(Duration::from_millis(random.u64(..window)));
        // It may have ended already.
        let _ = child.kill();
        kills += usize::from(!child.wait().expect("ends").success());
        let verify = Command::new(env!("CARGO_BIN_EXE_frit"))
            .args(["verify", "--quick"])
            .arg(&plan)
            .output();
        let verify = verify.expect("starts");
        let said = String::from_utf8_lossy(&verify.stderr).into_owned();
        assert!(verify.status.success(), "after {kills} kills: {said}");
        if kills == wanted {
            break;
        }
    }
}

#[test]
fn an_interrupted_run_saves_its_last_step() {
    use std::os::unix::process::ExitStatusExt;
    let training = Training::new();
    for (signal, number) in [("-INT", 2), ("-TERM", 15)] {
        let name = format!("run{signal}");
        let mut child = training.start(&name, 10_000_000);
        let begin = Instant::now();
        while training.losses(&name).len() < 3 {
            assert!(begin.elapsed() < Duration::from_secs(60), "no steps");
            std::thread::sleep(Duration::from_millis(5));
        }
        let id = child.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().expect("kill").success());
        let status = child.wait().expect("ends");
        assert_eq!(status.signal(), Some(number));
        let step = training.losses(&name).len();
        let latest = std::fs::read_to_string(training.file(&name).join("latest")).expect("latest");
        assert_eq!(latest, format!("step-{step:08}\n"));
        assert!(training.start(&name, step + 3).wait().expect("ends").success());
        assert!(training.start("whole", step + 3).wait().expect("ends").success());
        assert_eq!(training.losses(&name), training.losses("whole"));
        assert_eq!(training.parameters(&name), training.parameters("whole"));
        std::fs::remove_dir_all(training.file("whole")).expect("removed");
        std::fs::remove_file(training.file("whole.jsonl")).expect("removed");
    }
}

#[test]
fn only_directories_that_can_be_written_are_taken() {
    let training = Training::new();
    let file: &Path = &training.file("data.safetensors");
    for (name, args, parts) in [
        ("data.safetensors", &["--steps", "1"][..], &["data.safetensors"][..]),
        ("fresh", &["--steps", "1", "--keep", "0"], &["--keep"]),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_frit"))
            .arg("run")
            .arg(training.file("plan"))
            .arg("--data")
            .arg(file)
            .args(args)
            .arg("--checkpoint")
            .arg(training.file(name))
            .output()
            .expect("starts");
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
    assert!(!training.file("fresh").exists());
}
