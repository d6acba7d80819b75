//! A full or failing disk at every operation of a run in turn: training continues where possible, complete files stay
//! intact, and nothing panics.

#![cfg(unix)]

mod tiny;

use frit_runtime::RunError;
use frit_runtime::checkpoint::{Checkpoint, CheckpointOptions};
use frit_runtime::files::{Operation, set_gate};
use frit_runtime::run::{RunOptions, RunReport, run};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

const STEPS: usize = 6;

/// How an operation fails.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// The disk is full (ENOSPC) or fails (EIO): the error's number.
    Error(i32),
    /// Fewer bytes are written than were given.
    Short,
    /// The disk is full from here on.
    Full,
}

/// What happens to the files of a folder.
struct Disk {
    folder: PathBuf,
    /// Operations so far, and which of them were writes.
    operations: Vec<Operation>,
    fault: Option<(usize, Fault)>,
}

static DISKS: Mutex<Vec<Disk>> = Mutex::new(Vec::new());

fn gate(operation: Operation, path: &Path) -> io::Result<usize> {
    let mut disks = DISKS.lock().expect("no panic");
    let len = if let Operation::Write(len) = operation { len } else { 0 };
    let Some(disk) = disks.iter_mut().find(|d| path.starts_with(&d.folder)) else { return Ok(len) };
    let number = disk.operations.len();
    disk.operations.push(operation);
    let grows = !matches!(operation, Operation::Remove | Operation::Rename);
    match disk.fault {
        Some((at, Fault::Error(code))) if at == number => Err(io::Error::from_raw_os_error(code)),
        Some((at, Fault::Short)) if at == number => Ok(len.min(3)),
        Some((at, Fault::Full)) if at <= number && grows => Err(io::Error::from_raw_os_error(28)),
        _ => Ok(len),
    }
}

/// Runs with a fault in what is written to `dir`; also which operations there were.
fn run_on_disk(
    plan: &Path,
    dir: &Path,
    fault: Option<(usize, Fault)>,
) -> (Result<RunReport, RunError>, Vec<Operation>) {
    let disk = Disk { folder: dir.into(), operations: vec![], fault };
    DISKS.lock().expect("no panic").push(disk);
    let result = run(plan, &options(plan, dir, STEPS));
    let mut disks = DISKS.lock().expect("no panic");
    let at = disks.iter().position(|d| d.folder == dir).expect("it was put there");
    (result, disks.remove(at).operations)
}

fn options(plan: &Path, dir: &Path, steps: usize) -> RunOptions {
    let checkpoint = CheckpointOptions {
        dir: dir.join("checkpoints"),
        every: Some(2),
        resume: true,
        keep: Some(2),
    };
    RunOptions {
        steps,
        data: plan.with_file_name("data.safetensors").into(),
        metrics: Some(dir.join("metrics.jsonl")),
        save: Some(dir.join("saved.safetensors")),
        dump_grads: Some(dir.join("gradients.safetensors")),
        checkpoint: Some(checkpoint),
        threads: Some(1),
        ..RunOptions::default()
    }
}

/// Names that begin or end as temporary ones do, anywhere in a folder.
fn leftovers(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return vec![] };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let path = entry.path();
        if entry.file_name().to_string_lossy().contains(".partial-") {
            found.push(path);
        } else if path.is_dir() {
            found.extend(leftovers(&path));
        }
    }
    found
}

/// Every tensor of the latest checkpoint, each with its checksum verified; `None` if there is none.
fn latest(dir: &Path) -> Option<(usize, Vec<Vec<u8>>)> {
    let checkpoint = Checkpoint::latest(&dir.join("checkpoints")).unwrap_or_else(|e| panic!("{e}"));
    let checkpoint = checkpoint?;
    let read = |key: &String| checkpoint.tensor(key).unwrap_or_else(|e| panic!("{e}"));
    Some((checkpoint.index.step, checkpoint.index.tensors.keys().map(read).collect()))
}

#[test]
fn a_disk_that_fails_at_any_operation_costs_no_more_than_what_it_held() {
    set_gate(gate);
    let folder = tempfile::tempdir().expect("a directory");
    let plan = tiny::compiled(folder.path(), 2, &[]);
    let place = |name: &str| {
        let dir = folder.path().join(name);
        std::fs::create_dir(&dir).expect("made");
        dir.canonicalize().expect("it is there")
    };
    let clean = place("clean");
    let (expected, operations) = run_on_disk(&plan, &clean, None);
    let expected = expected.unwrap_or_else(|e| panic!("{e}"));
    let state = latest(&clean).expect("a checkpoint");
    assert_eq!((expected.losses.len(), state.0), (STEPS, STEPS));
    assert!(leftovers(&clean).is_empty() && expected.warnings.is_empty());
    assert!(operations.len() > 50, "{operations:?}");
    let mut survived = 0;
    for (k, operation) in operations.iter().enumerate() {
        let mut faults = vec![Fault::Error([28, 5][k % 2])];
        faults.extend(matches!(operation, Operation::Write(_)).then_some(Fault::Short));
        faults.extend(k.is_multiple_of(7).then_some(Fault::Full));
        for fault in faults {
            let what = format!("{fault:?} at operation {k}, {operation:?}");
            let dir = place(&format!("{k}-{fault:?}"));
            let (result, seen) = run_on_disk(&plan, &dir, Some((k, fault)));
            let hit = seen.get(k).copied();
            let before = latest(&dir);
            match &result {
                Ok(report) => {
                    survived += 1;
                    assert_eq!(report.losses, expected.losses, "{what}");
                    assert_eq!(before.as_ref(), Some(&state), "{what}");
                }
                Err(error) => assert!(!error.to_string().is_empty(), "{what}"),
            }
            if fault == Fault::Short {
                assert!(result.is_ok(), "{what}: {result:?}");
            }
            // What could not be removed stays until the directory is used again.
            if hit != Some(Operation::Remove) && fault != Fault::Full {
                assert_eq!(leftovers(&dir), Vec::<PathBuf>::new(), "{what}: {result:?}");
            }
            // Whatever it was, with a disk that works the run goes on to the same end.
            run(&plan, &options(&plan, &dir, STEPS)).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert_eq!(latest(&dir).as_ref(), Some(&state), "{what}");
            assert!(leftovers(&dir.join("checkpoints")).is_empty(), "{what}");
            std::fs::remove_dir_all(&dir).expect("removed");
        }
    }
    // The files that are looked at before the first step, and the last ones, end a run; all others do not.
    assert!(survived * 2 > operations.len(), "{survived} of {}", operations.len());
}
