//! A disk that is full or fails while a plan directory is written or replaced: the directory has the complete old plan
//! or the complete new one.

use crate::support::{Planned, plan};
use frit::plan_dir::{self, Stored};
use frit_runtime::files::{Operation, set_gate};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Folder, operations so far, and the one that fails with an error or a short write.
type Disk = (PathBuf, usize, Option<(usize, Option<i32>)>);

static DISKS: Mutex<Vec<Disk>> = Mutex::new(Vec::new());

fn gate(operation: Operation, path: &Path) -> io::Result<usize> {
    let len = if let Operation::Write(len) = operation { len } else { 0 };
    let mut disks = DISKS.lock().expect("no panic");
    let disk = disks.iter_mut().find(|(folder, ..)| path.starts_with(folder));
    let Some((_, number, fault)) = disk else { return Ok(len) };
    *number += 1;
    match fault {
        Some((at, Some(code))) if *at + 1 == *number => Err(io::Error::from_raw_os_error(*code)),
        Some((at, None)) if *at + 1 == *number => Ok(len.div_ceil(2)),
        _ => Ok(len),
    }
}

/// Writes a plan with a fault; how many operations there were, and what came of it.
fn write(
    planned: &Planned,
    folder: &Path,
    fault: Option<(usize, Option<i32>)>,
) -> (usize, Result<(), frit::diagnostics::Report>) {
    DISKS.lock().expect("no panic").push((folder.into(), 0, fault));
    let result = plan_dir::write(&folder.join("plan"), &planned.compiled, Stored::Copy);
    let mut disks = DISKS.lock().expect("no panic");
    let at = disks.iter().position(|(f, ..)| f == folder).expect("it was put there");
    (disks.remove(at).1, result)
}

/// All files of a folder with their content.
fn content(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut all = Vec::new();
    let mut entries: Vec<_> =
        std::fs::read_dir(folder).expect("a folder").map(|e| e.expect("an entry").path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            all.extend(content(&path));
        } else {
            let bytes = std::fs::read(&path).expect("a file");
            all.push((path, bytes));
        }
    }
    all
}

#[test]
fn a_plan_directory_is_the_old_one_or_the_new_one() {
    set_gate(gate);
    let model = "tests/models/mlp/model.onnx";
    let (old, new) = (plan(model, 4, &[]), plan(model, 8, &["precision.compute=bf16"]));
    let dir = tempfile::tempdir().expect("a directory");
    let folder = dir.path().canonicalize().expect("it is there");
    assert!(write(&old, &folder, None).1.is_ok());
    let before = content(&folder);
    let (operations, result) = write(&new, &folder, None);
    assert!(result.is_ok());
    let after = content(&folder);
    assert_ne!(before, after);
    assert!(operations > 15, "{operations}");
    for at in 0..operations {
        for fault in [Some(28), Some(5), None] {
            assert!(write(&old, &folder, None).1.is_ok());
            assert_eq!(content(&folder), before);
            let (_, result) = write(&new, &folder, Some((at, fault)));
            // What is left of the old plan may be what could not be removed.
            let found = content(&folder);
            let found: Vec<_> =
                found.into_iter().filter(|(p, _)| p.starts_with(folder.join("plan"))).collect();
            match result {
                Ok(()) => assert_eq!(found, after, "{fault:?} at {at}"),
                Err(report) => {
                    assert_eq!(found, before, "{fault:?} at {at}");
                    assert!(report.to_string().contains("plan"), "{report}");
                    assert!(fault.is_some(), "a short write is no error: {report}");
                }
            }
            for entry in std::fs::read_dir(&folder).expect("a folder") {
                let path = entry.expect("an entry").path();
                if path != folder.join("plan") {
                    assert!(at + 1 >= operations, "{} is left: {fault:?} at {at}", path.display());
                    std::fs::remove_dir_all(path).expect("removed");
                }
            }
        }
    }
}
