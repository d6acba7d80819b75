//! The dependency rules between crates, and that no test passes by being skipped.

use crate::support::file;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
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
    assert_eq!(dependencies("passes/verify"), ["frit-ir"]);
    assert_eq!(dependencies("kernels/library"), Vec::<String>::new());
    assert_eq!(dependencies("kernels/codegen"), ["frit-ir", "melior", "mlir-sys"]);
    assert_eq!(dependencies("kernels/select"), ["frit-ir", "frit-kernels"]);
    assert_eq!(dependencies("runtime/comm"), ["frit-ir"]);
    assert_eq!(dependencies("runtime/cuda"), ["frit-ir"]);
    assert_eq!(dependencies("runtime/data"), ["frit-ir"]);
    let below_runtime = ["frit-comm", "frit-cuda", "frit-data", "frit-ir", "frit-kernels"];
    assert_eq!(dependencies("runtime"), below_runtime);
    let below_python = ["frit", "frit-ir", "frit-passes", "frit-runtime"];
    assert_eq!(dependencies("compiler/python"), below_python);
}

#[test]
fn every_source_file_opens_with_what_it_is() {
    let folders = ["ir", "passes", "kernels", "runtime", "compiler"].map(file);
    let files: Vec<PathBuf> = folders.iter().flat_map(|f| sources(f)).collect();
    for path in &files {
        let text = std::fs::read_to_string(path).expect("text");
        assert!(text.starts_with("//!"), "{} lacks its module doc", path.display());
        assert!(text.lines().count() <= 700, "{} is too long", path.display());
    }
    assert!(files.len() > 100, "only {} files", files.len());
}

/// The Rust files of a folder and its folders.
pub(crate) fn sources(folder: &Path) -> Vec<PathBuf> {
    sources_in(folder, &["rs"])
}

/// Files with one of these extensions.
pub(crate) fn sources_in(folder: &Path, extensions: &[&str]) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder").map(|e| e.expect("an entry").path());
    let (folders, files): (Vec<_>, Vec<_>) = entries.partition(|p| p.is_dir());
    let of_these = |p: &PathBuf| p.extension().is_some_and(|e| extensions.iter().any(|x| e == *x));
    let found = files.into_iter().filter(of_these);
    found.chain(folders.iter().flat_map(|f| sources_in(f, extensions))).collect()
}

/// The modules of the crate's root that each of them uses.
fn uses(crate_root: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let mut uses: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for path in sources(crate_root) {
        let below = path.strip_prefix(crate_root).expect("a file of the crate");
        let first = below.components().next().expect("a name").as_os_str().to_string_lossy();
        let module = first.trim_end_matches(".rs").to_string();
        let text = std::fs::read_to_string(&path).expect("text");
        let named = text.split("crate::").skip(1).map(|rest| {
            let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let name = rest.split(|c| !is_name(c)).next().unwrap_or_default();
            assert!(!name.is_empty(), "{}: name one module after `crate::`", path.display());
            name.to_string()
        });
        let others: Vec<String> = named.filter(|name| *name != module).collect();
        uses.entry(module).or_default().extend(others);
    }
    uses
}

#[test]
fn modules_of_the_compiler_have_no_cycles_and_commands_are_used_by_none() {
    let mut uses = uses(&file("compiler/src"));
    assert!(uses["commands"].contains("compilation") && uses.len() > 20, "{uses:?}");
    for (module, used) in &uses {
        assert!(!used.contains("commands"), "`{module}` uses `crate::commands`");
    }
    while !uses.is_empty() {
        let left: BTreeSet<String> = uses.keys().cloned().collect();
        uses.retain(|_, used| used.iter().any(|u| left.contains(u)));
        assert!(uses.len() < left.len(), "a cycle among {uses:?}");
    }
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
