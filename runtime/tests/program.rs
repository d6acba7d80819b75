//! Tests of the `frit-run` command line.

use std::process::{Command, Output};

fn frit_run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_frit-run")).args(args).output().expect("the program starts")
}

#[test]
fn what_it_cannot_run_is_one_sentence_and_exit_code_2() {
    for args in [
        &["no/such/plan", "--data", "data.npz"][..],
        &["--data", "data.npz"],
        &[],
        &["plan", "--data", "data.npz", "--resume"],
        &["plan", "--data", "data.npz", "--checkpoint", "ckpt", "--keep", "0"],
    ] {
        let output = frit_run(args);
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
        assert!(message.starts_with("error: ") && !message.contains("panicked"), "{message}");
    }
    let help = frit_run(&["--help"]);
    assert!(help.status.success());
    assert!(String::from_utf8_lossy(&help.stdout).contains("Example"));
}
