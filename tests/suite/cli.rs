//! Bad input gives one clear error, and the commands do what their help says.

use crate::support::{file, plan};
use clap::Parser;
use frit::commands::{Cli, execute};
use std::path::Path;

fn frit(args: &[&str]) -> Result<String, String> {
    let cli = Cli::try_parse_from([&["frit"], args].concat()).map_err(|e| e.to_string())?;
    execute(&cli).map_err(|report| report.to_string())
}

/// The arguments fail, the message holds every part, and nothing was written.
fn refused(args: &[&str], parts: &[&str], output: &Path) {
    let message = frit(args).expect_err("must be refused");
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
    assert!(!output.exists(), "a partial plan was left");
}

#[test]
fn bad_models_and_settings_are_refused_in_one_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("plan");
    let out_text = out.to_str().unwrap();
    let model = file("tests/models/mlp/model.onnx");
    let model = model.to_str().unwrap();
    let cut = dir.path().join("cut.onnx");
    let bytes = std::fs::read(model).unwrap();
    std::fs::write(&cut, &bytes[..bytes.len() / 2]).unwrap();
    let cut = cut.to_str().unwrap();
    let with = |args: &[&'static str]| args.to_vec();
    refused(&["compile", cut, "--bind", "batch=4", "-o", out_text], &["cut.onnx"], &out);
    refused(&["compile", model, "-o", out_text], &["batch", "--bind"], &out);
    refused(&["compile", "no.onnx", "-o", out_text], &["no.onnx"], &out);
    let base = ["compile", model, "--bind", "batch=4", "-o", out_text];
    for (more, parts) in [
        (with(&["--set", "optimizer.lrr=1"]), &["optimizer.lrr", "optimizer.lr"][..]),
        (with(&["--set", "sharding.strategy=hybrid_shard"]), &["hybrid_shard"]),
        (with(&["--set", "loss.logits=nothing"]), &["nothing", "logits"]),
        (with(&["--stop-after", "nonsense"]), &["nonsense"]),
        (with(&["--stop-after", "fuse", "--disable-pass", "fuse"]), &["`fuse` does not run"]),
        (
            with(&["--disable-pass", "index_ranges"]),
            &["lowering requires the ranges of indices", "remove --disable-pass index_ranges"],
        ),
    ] {
        refused(&[&base[..], &more].concat(), parts, &out);
    }
    let toml = dir.path().join("train.toml");
    std::fs::write(&toml, "[optimizer]\nlearning_rate = 1.0\n").unwrap();
    let config = ["--config", toml.to_str().unwrap()];
    refused(&[&base[..], &config].concat(), &["learning_rate", "train.toml"], &out);
}

#[test]
fn bad_data_and_plans_are_refused_in_one_sentence() {
    let planned = plan("tests/models/mlp/model.onnx", 16, &["precision.compute=fp32"]);
    let path = planned.path();
    let path = path.to_str().unwrap();
    let gpt2 = file("tests/models/gpt2/data.safetensors");
    let message = frit(&["run", path, "--data", gpt2.to_str().unwrap()]).unwrap_err();
    assert!(message.contains("`x`"), "{message}");
    let message = frit(&["run", path, "--data", "data.txt"]).unwrap_err();
    assert!(message.contains("data.txt"), "{message}");

    let few = planned.dir.path().join("few.safetensors");
    let (x, labels) = (vec![0_u8; 4 * 784 * 4], vec![0_u8; 4 * 8]);
    let view = safetensors::tensor::TensorView::new;
    let tensors = [
        ("x", view(safetensors::Dtype::F32, vec![4, 784], &x).unwrap()),
        ("labels", view(safetensors::Dtype::I64, vec![4], &labels).unwrap()),
    ];
    safetensors::serialize_to_file(tensors, None, &few).unwrap();
    let message = frit(&["run", path, "--data", few.to_str().unwrap()]).unwrap_err();
    assert!(message.contains("4 examples") && message.contains("16"), "{message}");

    let wrong = planned.dir.path().join("wrong.safetensors");
    let (x, labels) = (vec![0_u8; 16 * 784 * 4], vec![0_u8; 16 * 4]);
    let tensors = [
        ("x", view(safetensors::Dtype::F32, vec![16, 784], &x).unwrap()),
        ("labels", view(safetensors::Dtype::F32, vec![16], &labels).unwrap()),
    ];
    safetensors::serialize_to_file(tensors, None, &wrong).unwrap();
    let message = frit(&["run", path, "--data", wrong.to_str().unwrap()]).unwrap_err();
    assert!(message.contains("labels") && message.contains("f32"), "{message}");

    let json = planned.path().join("plan.json");
    let text = std::fs::read_to_string(&json).unwrap();
    let version = format!("\"format_version\": {}", frit_ir::plan::FORMAT_VERSION);
    std::fs::write(&json, text.replacen(&version, "\"format_version\": 99", 1)).unwrap();
    for verb in ["inspect", "verify"] {
        let message = frit(&[verb, path]).unwrap_err();
        assert!(message.contains("99"), "{message}");
    }
}

#[test]
fn every_view_has_text_and_json() {
    let settings = ["sharding.ranks=2", "precision.compute=bf16"];
    let planned = plan("tests/models/gpt2/model.onnx", 4, &settings);
    let path = planned.path();
    let path = path.to_str().unwrap();
    let views = [
        "summary", "units", "casts", "schedule", "memory", "roofline", "kernels", "lints", "graph",
    ];
    for view in views {
        let text = frit(&["inspect", path, "--view", view]).unwrap();
        assert!(!text.is_empty(), "{view}");
        let json = frit(&["inspect", path, "--view", view, "--json"]).unwrap();
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert!(value.is_object() || value.is_array(), "{view}");
    }
    let json = frit(&["inspect", path, "--json"]).unwrap();
    let summary: serde_json::Value = serde_json::from_str(&json).unwrap();
    for key in ["ranks", "strategy", "casts", "peak_bytes", "peak_lower_bound_bytes"] {
        assert!(!summary[key].is_null(), "{key}");
    }
    let on = ["inspect", path, "--cluster", "h200"];
    assert_eq!(frit(&on), frit(&[&on[..], &["--view", "roofline"]].concat()));
    let message = frit(&[&on[..], &["--view", "lints"]].concat()).unwrap_err();
    assert!(message.contains("--cluster is not of the view"), "{message}");
    // Numbers are numbers.
    for (view, number) in [
        ("schedule", "task"),
        ("schedule", "us"),
        ("memory", "bytes"),
        ("memory", "offset"),
        ("kernels", "uses"),
        ("casts", "task"),
    ] {
        let json = frit(&["inspect", path, "--view", view, "--json"]).unwrap();
        let rows: Vec<serde_json::Value> = serde_json::from_str(&json).unwrap();
        assert!(!rows.is_empty() && rows.iter().all(|r| r[number].is_number()), "{view} {number}");
    }
    assert!(frit(&["verify", path, "--quick"]).unwrap().contains("sound"));
    let page = planned.dir.path().join("report.html");
    frit(&["report", path, "-o", page.to_str().unwrap()]).unwrap();
    assert!(std::fs::read_to_string(page).unwrap().contains("</html>"));
    assert!(frit(&["passes"]).unwrap().contains("autocast"));
}

#[test]
fn the_doctor_needs_no_gpu_and_fails_only_for_what_a_plan_lacks() {
    let text = frit(&["doctor"]).unwrap();
    for part in ["driver", "cuBLASLt", "NVRTC", "NCCL"] {
        assert!(text.lines().any(|l| l.starts_with(part)), "{text}");
    }
    let model = "tests/models/mlp/model.onnx";
    let cpu = plan(model, 4, &[]);
    let text = frit(&["doctor", cpu.path().to_str().unwrap()]).unwrap();
    assert!(text.lines().all(|l| !l.contains(" missing ")), "{text}");
    let cuda = plan(model, 4, &["target.device=cuda"]);
    let cli = Cli::try_parse_from(["frit", "doctor", cuda.path().to_str().unwrap()]).unwrap();
    match execute(&cli) {
        Ok(text) => assert!(text.contains("GPU 0") && text.contains("memory"), "{text}"),
        Err(report) => {
            assert_eq!(report.diagnostics[0].code, "E107");
            let text = report.to_string();
            assert!(text.contains("lacks what the plan needs: "), "{text}");
        }
    }
}

#[test]
fn every_verb_shows_examples() {
    use clap::CommandFactory;
    for verb in Cli::command().get_subcommands() {
        let help = verb.clone().render_long_help().to_string();
        let example = format!("  frit {}", verb.get_name());
        assert!(help.contains("Example") && help.contains(&example), "{}", verb.get_name());
    }
}

#[test]
fn the_report_is_one_page_that_needs_nothing_else() {
    let settings = ["sharding.ranks=2", "precision.compute=bf16", "run.accumulation=2"];
    let planned = plan("tests/models/gpt2/model.onnx", 4, &settings);
    let plan = &planned.compiled.plan;
    let predicted = frit::predict::step(plan).unwrap_or_else(|e| panic!("{e}"));
    let cluster = frit::predict::cluster(plan).expect("it is built in");
    let roofline = frit_passes::simulate::roofline::roofline(plan, &cluster);
    let certified = frit::report::Certified::left_out(&planned.path());
    let measured = frit::report::Measured::default();
    let page = frit::report::page(plan, &predicted, &roofline, &certified, &measured);
    for part in ["<svg", "Timeline", "Memory", "Precision", "Advice", "Units", "Kernels", "× 2"] {
        assert!(page.contains(part), "no `{part}`");
    }
    for other in ["http://", "https://", "<link", "url(", "@import"] {
        assert!(!page.contains(other), "the page reaches for `{other}`");
    }
    assert!(page.len() < 400_000, "{} bytes", page.len());
    for tag in ["svg", "table", "section", "details", "div"] {
        let (open, close) =
            (page.matches(&format!("<{tag}")).count(), page.matches(&format!("</{tag}>")).count());
        assert_eq!(open, close, "<{tag}>");
    }
    let bad = page.contains("NaN") || page.contains("='inf'");
    assert!(!bad, "a number of a drawing is not finite");
}
