//! Runs the tests of the Python package, which are beside this file, with pytest on the module that was built.

use frit_tests::requirements::Requirement;
use std::env::{current_exe, join_paths, split_paths, var_os};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Puts the package together: the Python files, and the module that cargo has built beside this program.
fn assemble(package: &Path) {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("frit");
    fs::create_dir(package).expect("a folder");
    for entry in fs::read_dir(sources).expect("the sources") {
        let path = entry.expect("an entry").path();
        if path.is_file() {
            fs::copy(&path, package.join(path.file_name().expect("a name"))).expect("a copy");
        }
    }
    let built = current_exe().expect("this program").with_file_name("lib_frit.so");
    std::os::unix::fs::symlink(built, package.join("_frit.abi3.so")).expect("a link");
}

#[test]
fn the_package_passes_its_tests() {
    let Some(libraries) = Requirement::Python.find() else { return };
    let site = tempfile::tempdir().expect("a directory");
    assemble(&site.path().join("frit"));
    let inherited = var_os("PYTHONPATH").unwrap_or_default();
    let found = [site.path().to_path_buf(), libraries].into_iter().chain(split_paths(&inherited));
    let status = Command::new("python3")
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests"))
        // Python looks here first; beside the sources it would find them, without the module.
        .current_dir(site.path())
        .env("PYTHONPATH", join_paths(found).expect("paths"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .status();
    assert!(status.expect("python3 starts").success(), "pytest fails");
}
