//! Tests of kernels by every set of instructions that they have a path for.

#[cfg(target_arch = "x86_64")]
use crate::dtype::Elem;
use std::process::Command;

/// Names the only path of GEMMs and loops that a test program takes.
const PATH: &str = "FRIT_TEST_PATH";

/// The path that the tests are to take, if not the best.
pub(crate) fn path() -> Option<String> {
    std::env::var(PATH).ok()
}

/// Paths of this architecture, and whether this processor has them.
#[cfg(target_arch = "x86_64")]
fn paths() -> Vec<(&'static str, bool)> {
    use std::arch::is_x86_feature_detected as has;
    let avx2 = has!("avx2") && has!("fma") && has!("f16c");
    let avx512 = avx2 && has!("avx512bw") && has!("avx512dq") && has!("avx512vl");
    vec![
        ("baseline", true),
        ("avx2", avx2),
        ("avx512", avx512),
        ("avx512-bf16", avx512 && has!("avx512bf16")),
        ("amx-software", true),
        ("amx-bf16", crate::routine::gemm::name_of(Elem::BF16) == "amx-bf16"),
    ]
}

/// As for x86-64.
#[cfg(target_arch = "aarch64")]
fn paths() -> Vec<(&'static str, bool)> {
    use std::arch::is_aarch64_feature_detected as has;
    vec![("baseline", true), ("neon", has!("neon")), ("neon-bf16", has!("neon") && has!("bf16"))]
}

#[test]
fn every_path_multiplies_and_convolves() {
    if path().is_some() {
        return;
    }
    let tests = std::env::current_exe().expect("the test program");
    for (name, is_there) in paths() {
        if !is_there {
            eprintln!("skipped: this processor has no {name}");
            continue;
        }
        let mut command = Command::new(&tests);
        command.args(["routine::gemm", "routine::conv", "routine::attention"]).env(PATH, name);
        let output = command.output().expect("the test program runs");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{name}, {}: {said}", output.status);
        assert!(!said.contains(" 0 passed"), "{name}: {said}");
    }
}

/// What a program that is limited to the features of x86-64-v3 takes.
#[cfg(target_arch = "x86_64")]
#[test]
fn a_limit_is_a_choice_among_what_the_processor_has() {
    const LIMITED: &str = "FRIT_TEST_LIMITED";
    const NAME: &str = "tests::a_limit_is_a_choice_among_what_the_processor_has";
    if std::env::var_os(LIMITED).is_some() {
        crate::cpu::limit("+avx2,+fma,+f16c");
        assert_eq!(crate::cpu::paths(), crate::cpu::Paths { f32: "avx2", bf16: "avx2" });
        return;
    }
    let has_avx2 = paths().contains(&("avx2", true));
    if path().is_some() || !has_avx2 {
        return;
    }
    let tests = std::env::current_exe().expect("the test program");
    let output = Command::new(&tests).args(["--exact", NAME]).env(LIMITED, "1").output();
    let output = output.expect("the test program runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains(" 1 passed"), "{said}");
}
