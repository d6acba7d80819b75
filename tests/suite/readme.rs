//! The README is correct: every command of its tour runs, and prints the text below it. The figure above it is drawn
//! from a plan. CONTRIBUTING.md lists the files that a new operation touches.

use crate::figures;
use crate::simulate::predict_model;
use crate::support::file;
use crate::tidy::sources_in;
use clap::Parser;
use frit::clusters;
use frit::commands::{Cli, execute};
use frit_passes::simulate::simulate;
use std::collections::BTreeSet;
use std::path::Path;

/// A command of the tour, and what it prints if that is shown.
#[derive(Debug)]
struct Step {
    words: Vec<String>,
    output: Vec<String>,
}

fn tour() -> Vec<Step> {
    let text = std::fs::read_to_string(file("README.md")).expect("a README");
    let mut steps: Vec<Step> = Vec::new();
    let mut open = false;
    for line in text.lines() {
        match line.strip_prefix("    ") {
            Some(command) if command.starts_with("$ frit ") => {
                let command = command["$ frit ".len()..].split(" # ").next().unwrap_or_default();
                let words = command.split_whitespace().map(String::from).collect();
                steps.push(Step { words, output: vec![] });
                open = true;
            }
            Some(printed) if open => {
                steps.last_mut().expect("a command").output.push(printed.into());
            }
            _ => open = false,
        }
    }
    steps
}

/// Files of the repository are read there; those that the tour makes lie in `dir`.
fn placed(word: &str, dir: &Path) -> String {
    let made = [".safetensors", ".onnx", ".html", ".jsonl"];
    match word {
        _ if word.starts_with("examples/") => file(word).to_string_lossy().into_owned(),
        _ if word == "plan" || made.iter().any(|end| word.ends_with(end)) => {
            dir.join(word).to_string_lossy().into_owned()
        }
        _ => word.into(),
    }
}

/// The same words; numbers of a run may differ in the last digits from one processor to another, and there is advice of the
/// processor's own: where it has no instructions for bf16, that is no faster than f32.
fn agree(printed: &str, shown: &str) -> bool {
    if [printed, shown].iter().all(|line| line.trim().starts_with("advice ")) {
        return true;
    }
    let (printed, shown): (Vec<&str>, Vec<&str>) =
        (printed.split_whitespace().collect(), shown.split_whitespace().collect());
    printed.len() == shown.len()
        && printed.iter().zip(&shown).all(|(a, b)| {
            let number = |text: &str| text.contains('.').then(|| text.parse::<f64>().ok()).flatten();
            a == b || matches!((number(a), number(b)), (Some(a), Some(b)) if (a - b).abs() < 0.01 * b.abs())
        })
}

#[test]
fn the_tour_prints_what_it_shows() {
    let dir = tempfile::tempdir().expect("a directory");
    let (mut shown, steps) = (0, tour());
    for step in &steps {
        let words = step.words.iter().map(|word| placed(word, dir.path()));
        let cli = Cli::try_parse_from(std::iter::once("frit".into()).chain(words));
        let printed = execute(&cli.unwrap_or_else(|e| panic!("{step:?}: {e}")));
        let printed = printed.unwrap_or_else(|e| panic!("{step:?}: {e}"));
        if step.output.is_empty() {
            continue;
        }
        let folders = [dir.path().to_path_buf(), file("")];
        let printed = folders.iter().fold(printed, |text, folder| {
            text.replace(&format!("{}/", folder.display().to_string().trim_end_matches('/')), "")
        });
        let lines: Vec<&str> = printed.lines().collect();
        let same = lines.len() == step.output.len()
            && lines.iter().zip(&step.output).all(|(a, b)| agree(a, b));
        assert!(
            same,
            "README shows for {:?}\n{}\nand it prints\n{printed}",
            step.words,
            step.output.join("\n")
        );
        shown += 1;
    }
    assert!(steps.len() >= 9 && shown >= 3, "{shown} of {} commands", steps.len());
}

#[test]
fn the_picture_is_of_a_plan() {
    let sizes = "batch=1 layers=4 width=4096 heads=32 kv_heads=8 ffn=14336 vocab=32000 seq=8192";
    let settings = [
        "sharding.ranks=8",
        "sharding.prefetch=fixed",
        "memory.recompute=unit",
        "target.device=cuda",
        "target.arch=sm_90",
    ];
    let plan = predict_model("examples/llama/model.json", sizes, &settings);
    let cluster = clusters::read("h100").unwrap_or_else(|e| panic!("{e}"));
    figures::keep("plan.svg", &figures::schedule(&plan, &simulate(&plan, &cluster)));
}

/// The files that CONTRIBUTING.md lists for an operation are those that name it.
#[test]
fn the_files_of_an_operation_are_those_that_are_listed() {
    let text = std::fs::read_to_string(file("CONTRIBUTING.md")).expect("a guide");
    let section = |from: &str| {
        let rest = text.split_once(from).unwrap_or_else(|| panic!("no {from}")).1;
        let rows = rest.lines().skip_while(|l| !l.starts_with("| `"));
        let rows = rows.take_while(|l| l.starts_with("| `"));
        rows.map(|l| l.split('`').nth(1).expect("a path").to_string()).collect::<BTreeSet<_>>()
    };
    // What only reads the operation: a composite operator, an archive that is rewritten, a pattern that is recognized.
    let readers = [
        "compiler/src/import/onnx/ops/scatter.rs",
        "compiler/src/import/onnx/selected.rs",
        "compiler/src/import/pt2/ops/pointwise.rs",
        "compiler/src/import/pt2/ops/reduction.rs",
        "passes/src/documents/mod.rs",
        "passes/src/index_ranges/causal.rs",
        "passes/src/raise/activation.rs",
    ];
    for (listed, names, most) in [
        (section("`cum_sum`, a running sum"), ["CumSum", "cum_sum"], 10),
        (section("`erf`:"), ["Erf", "fn erf"], 8),
    ] {
        let mut naming = BTreeSet::new();
        for root in ["ir/src", "passes/src", "kernels", "compiler/src", "runtime/src"] {
            for path in sources_in(&file(root), &["rs", "cu"]) {
                let path = path.strip_prefix(file("")).expect("of the workspace").to_owned();
                let name = path.to_string_lossy().into_owned();
                let is_test = name.contains("/tests") || readers.contains(&name.as_str());
                let text = std::fs::read_to_string(file(&name)).expect("text");
                if !is_test && names.iter().any(|n| has_word(&text, n)) {
                    naming.insert(name);
                }
            }
        }
        assert_eq!(listed, naming, "CONTRIBUTING.md, {names:?}");
        assert!(listed.len() <= most, "{names:?} touches {} files", listed.len());
    }
}

fn has_word(text: &str, word: &str) -> bool {
    let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    text.match_indices(word).any(|(at, _)| {
        !part(text[..at].chars().next_back()) && !part(text[at + word.len()..].chars().next())
    })
}
