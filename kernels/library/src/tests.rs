//! Tests of kernels that have several ways on processors of one kind.

use std::process::Command;

/// Says, if it is set, whether bf16 numbers are multiplied in pairs where the processor can.
pub(crate) const BF16_DOTS: &str = "FRIT_TEST_BF16_DOTS";

#[test]
fn bf16_is_multiplied_in_pairs_and_as_f32() {
    let other = if crate::simd::prefers_bf16_dots() { "0" } else { "1" };
    let tests = std::env::current_exe().expect("the test program");
    let mut command = Command::new(tests);
    command.args(["routine::gemm", "routine::conv", "routine::attention"]).env(BF16_DOTS, other);
    let output = command.output().expect("the test program runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    assert!(!said.contains("0 passed"), "{said}");
}
