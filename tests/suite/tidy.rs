//! The borders between crates.

use crate::support::file;

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
