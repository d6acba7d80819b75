//! The borders between crates, and that no test passes by being absent.

use crate::support::file;
use std::path::Path;
use std::process::Command;

/// Crates of the workspace that a crate names among its dependencies.
fn dependencies(folder: &str) -> Vec<String> {
    let text = std::fs::read_to_string(file(&format!("{folder}/Cargo.toml"))).expect("a manifest");
    let body = text.split("[dependencies]").nth(1).unwrap_or_default();
    let body = body.split("[dev-dependencies]").next().unwrap_or_default();
    body.lines()
        .filter_map(|l| l.split(['.', ' ', '=']).next())
        .filter(|n| n.starts_with("frit") || *n == "melior" || *n == "mlir-sys" || *n == "prost")
        .map(str::to_string)
        .collect()
}

#[test]
fn crates_depend_only_on_what_the_architecture_allows() {
    assert_eq!(dependencies("ir"), Vec::<String>::new());
    assert_eq!(dependencies("passes"), ["frit-ir"]);
    assert_eq!(dependencies("kernels/library"), Vec::<String>::new());
    assert_eq!(dependencies("kernels/codegen"), ["frit-ir", "melior", "mlir-sys"]);
    assert_eq!(dependencies("kernels/select"), ["frit-ir", "frit-kernels"]);
    assert_eq!(dependencies("runtime"), ["frit-ir", "frit-kernels"]);
}

#[test]
fn every_source_file_opens_with_what_it_is() {
    let mut folders = ["ir", "passes", "kernels", "runtime", "compiler"].map(file).to_vec();
    let mut seen = 0;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = std::fs::read_to_string(&path).expect("text");
                assert!(text.starts_with("//!"), "{} lacks its module doc", path.display());
                assert!(text.lines().count() <= 700, "{} is too long", path.display());
                seen += 1;
            }
        }
    }
    assert!(seen > 100, "only {seen} files");
}

/// A test of this program that needs NVRTC, without it.
fn without_nvrtc(required: &str, skipped: &Path) -> std::process::Output {
    Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "driver::code_of_nvrtc_is_launched_within_its_limits"])
        .env_remove("FRIT_NVRTC")
        .env("FRIT_REQUIRE", required)
        .env("FRIT_SKIPPED", skipped)
        .output()
        .expect("this program starts")
}

#[test]
fn a_test_that_lacks_something_fails_where_it_is_required_and_is_counted_elsewhere() {
    let dir = tempfile::tempdir().expect("a directory");
    let skipped = dir.path().join("skipped.txt");
    for required in ["nvrtc", "ptxas,nvrtc", "all"] {
        let ended = without_nvrtc(required, &skipped);
        let said = String::from_utf8_lossy(&ended.stdout).into_owned();
        assert!(!ended.status.success() && said.contains("needs nvrtc"), "{required}: {said}");
    }
    assert!(!skipped.exists());
    assert!(without_nvrtc("ptxas", &skipped).status.success());
    let noted = std::fs::read_to_string(&skipped).expect("a line");
    assert_eq!(noted, "nvrtc: driver::code_of_nvrtc_is_launched_within_its_limits\n");
}
