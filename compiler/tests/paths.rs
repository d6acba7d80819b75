//! Which instructions a run of a plan uses: the best that the plan lists and this processor has.

#![cfg(target_arch = "x86_64")]

mod tiny;

use frit_ir::plan::Plan;
use std::path::Path;
use std::process::Command;

/// Runs two steps of a plan. Returns the paths of f32 and bf16 GEMMs that its metrics name, and the losses.
fn run(dir: &Path, plan: &Path) -> ([String; 2], Vec<f64>) {
    let metrics = dir.join("metrics.jsonl");
    let _ = std::fs::remove_file(&metrics);
    let mut command = Command::new(env!("CARGO_BIN_EXE_frit"));
    command.arg("run").arg(plan).arg("--data").arg(dir.join("data.safetensors"));
    command.args(["--steps", "2", "--metrics"]).arg(&metrics);
    let output = command.output().expect("starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(&metrics).expect("metrics");
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let path = |elem: &str| lines[0]["gemm"][elem].as_str().expect("a name").to_string();
    (["f32", "bf16"].map(path), lines.iter().map(|l| l["loss"].as_f64().expect("a loss")).collect())
}

/// Changes the features that a plan lists.
fn list(plan: &Path, change: impl Fn(&str) -> String) {
    let path = plan.join("plan.json");
    let text = std::fs::read_to_string(&path).expect("a plan");
    let mut parsed = Plan::from_json(&text).expect("a plan");
    parsed.target.features = change(&parsed.target.features);
    std::fs::write(&path, parsed.to_json()).expect("written");
}

#[test]
fn a_run_takes_what_its_plan_lists_and_says_so() {
    let dir = tempfile::tempdir().expect("a directory");
    let plan = tiny::compiled(dir.path(), 1, &["target.arch=x86-64-v3"]);
    let (paths, losses) = run(dir.path(), &plan);
    assert_eq!(paths, ["avx2"; 2]);
    // Instructions that no processor needs to run the generated code: a plan from one that has them runs without.
    list(&plan, |features| format!("{features},+amx-tile,+amx-bf16"));
    let (_, same) = run(dir.path(), &plan);
    assert_eq!(same, losses);
}

#[test]
fn a_plan_for_this_processor_takes_its_best_path() {
    let dir = tempfile::tempdir().expect("a directory");
    let plan = tiny::compiled(dir.path(), 1, &[]);
    let (paths, _) = run(dir.path(), &plan);
    let has_avx512 = is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    // Where there is AMX, which the standard library cannot ask for, f32 numbers are multiplied as sums of bf16 numbers.
    let expected: &[&str] = if has_avx512 { &["avx512", "amx-bf16x3"] } else { &["avx2"] };
    assert!(expected.contains(&paths[0].as_str()), "{paths:?}");
    list(&plan, |features| {
        let kept: Vec<&str> = features.split(',').filter(|f| !f.contains("avx512")).collect();
        kept.join(",")
    });
    assert_eq!(run(dir.path(), &plan).0[0], "avx2");
}
