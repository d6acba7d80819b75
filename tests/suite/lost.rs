//! Losses of an export are reported: parameters that no gradient reaches, and batch normalizations that were folded
//! away.

use crate::support::{Planned, file, plan_at};
use clap::Parser;
use frit::commands::{Cli, execute};
use frit::export::{self, Options, Trained};
use frit_ir::ops::ParamKind;
use frit_ir::{Diagnostic, Severity};

fn compiled(model: &str, settings: &[&str]) -> Planned {
    let settings = [&["precision.compute=fp32"], settings].concat();
    plan_at(&file(&format!("tests/models/lost/{model}.onnx")), 4, &settings)
}

fn warning<'p>(planned: &'p Planned, code: &str) -> Option<&'p Diagnostic> {
    planned.compiled.plan.lints.iter().find(|d| d.code == code)
}

fn inspect(planned: &Planned, more: &[&str]) -> String {
    let path = planned.path();
    let args = [&["frit", "inspect", path.to_str().expect("a path")], more].concat();
    let cli = Cli::try_parse_from(args).unwrap_or_else(|e| panic!("{e}"));
    execute(&cli).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn parameters_without_a_gradient_are_named_with_where_it_ends() {
    let first = ["`a.bias` and 1 more (144 elements)", "depends on them only through"];
    for (model, parts, listed, trained) in [
        ("round", [first[0], first[1], "`round`", "node_round_1"], "a.weight", "85 of 229"),
        ("round_torchscript", [first[0], first[1], "`round`", "/Round"], "a.weight", "85 of 229"),
        ("detach", [first[0], first[1], "`detach`", "node_detach"], "a.weight", "85 of 229"),
        (
            "integers",
            [first[0], first[1], "conversion to i64", "node__to_copy"],
            "a.weight",
            "85 of 229",
        ),
        (
            "head",
            ["`value.bias` and 1 more (51 elements)", "the loss does not depend on them", "", ""],
            "value.weight",
            "229 of 229",
        ),
    ] {
        let planned = compiled(model, &[]);
        let found = warning(&planned, "W061").unwrap_or_else(|| panic!("{model}: no warning"));
        let text = found.to_string();
        let (a, b) = (parts[0].replace("bias", "weight"), parts[0]);
        assert!(text.contains(&a) || text.contains(b), "{model}: {text}");
        assert!(parts[1..].iter().all(|part| text.contains(part)), "{model}: {text}");
        assert!(found.notes.iter().any(|n| n.contains(listed)), "{model}: {:?}", found.notes);
        assert!(found.help.as_deref().is_some_and(|h| h.contains("docs/exporting.md")), "{model}");
        let summary = inspect(&planned, &[]);
        let expected = format!(
            "trains {} ({trained} elements)",
            if model == "head" { "4 of 4 parameters" } else { "2 of 4 parameters" }
        );
        assert!(summary.contains(&expected), "{model}: {summary}");
        if model == "head" {
            // What the step does not compute at all is not in its plan, only in that of the evaluation.
            continue;
        }
        let units = inspect(&planned, &["--view", "units", "--json"]);
        let units: Vec<serde_json::Value> = serde_json::from_str(&units).expect("a list");
        let lost = units.iter().find(|u| u["parameter"] == listed).expect("the parameter");
        assert_eq!(lost["kind"], "frozen", "{model}");
        // They are parameters all the same: what is exported has them.
        let weights = planned.path().join("weights.safetensors");
        let trained = Trained::of_plan(&planned.path(), &weights).unwrap_or_else(|e| panic!("{e}"));
        let to = planned.dir.path().join("exported.onnx");
        export::onnx(&trained, &Options::default(), &to).unwrap_or_else(|e| panic!("{e}"));
    }
}

#[test]
fn what_is_asked_for_is_not_warned_of() {
    for (model, frozen) in [("round", "a.*"), ("head", "value.*")] {
        let frozen = format!("params.frozen=[\"{frozen}\"]");
        let planned = compiled(model, &[&frozen]);
        assert_eq!(warning(&planned, "W061"), None, "{model}");
        let kinds = planned.compiled.plan.params.iter().filter(|p| p.kind == ParamKind::Frozen);
        assert_eq!(kinds.count(), if model == "head" { 0 } else { 2 }, "{model}");
    }
    let planned = plan_at(&file("tests/models/mlp/model.onnx"), 4, &["precision.compute=fp32"]);
    let lints = &planned.compiled.plan.lints;
    let warnings: Vec<_> = lints.iter().filter(|d| d.severity == Severity::Warning).collect();
    assert!(warnings.is_empty(), "{warnings:?}");
    assert!(inspect(&planned, &[]).contains("trains 6 of 6 parameters"));
}

#[test]
fn folded_batch_normalizations_are_warned_of() {
    for (model, n, name) in [("folded", 2, "`onnx::Conv_"), ("folded_dynamo", 2, "`0.weight`")] {
        let planned = compiled(model, &[]);
        let found = warning(&planned, "W035").unwrap_or_else(|| panic!("{model}: no warning"));
        let text = found.to_string();
        assert!(text.contains(&format!("{n} batch norm")) && text.contains(name), "{text}");
        assert!(found.help.as_deref().is_some_and(|h| h.contains("training mode")), "{text}");
    }
    for model in ["inference/model", "inference/model_dynamo", "resnet/model", "vit/model"] {
        let path = file(&format!("tests/models/{model}.onnx"));
        let planned = plan_at(&path, 8, &["precision.compute=fp32"]);
        assert_eq!(warning(&planned, "W035"), None, "{model}");
        assert_eq!(warning(&planned, "W039"), None, "{model}");
    }
}
