//! The counts in docs/verification.md are those of the sources: what has to be right for a certificate to be.

use crate::support::file;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A part of what is trusted: what it is for, and its files and folders.
struct Part {
    trusted_for: &'static str,
    sources: &'static [&'static str],
}

const PARTS: [Part; 9] = [
    Part {
        trusted_for: "terms, indices, their normal form; which outputs are compared",
        sources: &[
            "passes/verify/src/algebra.rs",
            "passes/verify/src/choice.rs",
            "passes/verify/src/compare.rs",
            "passes/verify/src/definition.rs",
            "passes/verify/src/explain.rs",
            "passes/verify/src/index.rs",
            "passes/verify/src/lib.rs",
            "passes/verify/src/integer.rs",
            "passes/verify/src/mask.rs",
            "passes/verify/src/name.rs",
            "passes/verify/src/operation.rs",
            "passes/verify/src/order.rs",
            "passes/verify/src/part.rs",
            "passes/verify/src/reading.rs",
            "passes/verify/src/rounding.rs",
            "passes/verify/src/substitute.rs",
            "passes/verify/src/term.rs",
            "passes/verify/src/truth.rs",
            "passes/verify/src/unstated.rs",
        ],
    },
    Part { trusted_for: "what operations compute", sources: &["passes/verify/src/lemmas"] },
    Part {
        trusted_for: "what a loss in chunks, or a matmul over several steps, is",
        sources: &["passes/verify/src/chunks", "passes/verify/src/steps.rs"],
    },
    Part { trusted_for: "gradients of operations", sources: &["passes/verify/src/gradient"] },
    Part {
        trusted_for: "what a loss, an update and a reproducible step are",
        sources: &["passes/verify/src/step"],
    },
    Part { trusted_for: "what the tasks of a plan compute", sources: &["passes/verify/src/tasks"] },
    Part {
        trusted_for: "which pass must keep what, and what a configuration asks for",
        sources: &[
            "compiler/src/certificate.rs",
            "compiler/src/certificate",
            "compiler/src/compilation/lowered.rs",
            "compiler/src/statement.rs",
        ],
    },
    Part {
        trusted_for: "that the tasks of a plan compute the step that lowering declares",
        sources: &["passes/src/verify_plan"],
    },
    Part {
        trusted_for: "what that step is, where its tasks are not shown to compute the last graph",
        sources: &["passes/src/lower"],
    },
];

/// The files of a part; tests are not trusted.
fn files(source: &Path) -> Vec<PathBuf> {
    if source.is_file() {
        return vec![source.into()];
    }
    let entries = fs::read_dir(source).unwrap_or_else(|e| panic!("{}: {e}", source.display()));
    let entries = entries.map(|entry| entry.expect("a file").path());
    let trusted = entries.filter(|path| !path.ends_with("tests") && !path.ends_with("tests.rs"));
    trusted.flat_map(|path| files(&path)).collect()
}

/// Lines of code: not empty, no comment, before the tests.
fn lines(path: &Path) -> usize {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let is_code = |line: &&str| !line.trim().is_empty() && !line.trim().starts_with("//");
    code.lines().filter(is_code).count()
}

/// The operations that are named in a function of a file.
fn operations(path: &str, function: &str) -> BTreeSet<String> {
    let text = fs::read_to_string(file(path)).expect("a source");
    let body = text.split(function).nth(1).unwrap_or_else(|| panic!("{path} has `{function}`"));
    let body = body.split("\n}\n").next().unwrap_or_default();
    let named = body.split("Op::").skip(1);
    named
        .map(|rest| rest.split(|c: char| !c.is_alphanumeric()).next().unwrap_or("").into())
        .collect()
}

#[test]
fn the_page_says_what_is_trusted() {
    let mut rows = vec![];
    let mut all = [0, 0];
    let named: BTreeSet<PathBuf> =
        PARTS.iter().flat_map(|part| part.sources).flat_map(|s| files(&file(s))).collect();
    let checker: BTreeSet<PathBuf> = files(&file("passes/verify/src")).into_iter().collect();
    let missing: Vec<&PathBuf> = checker.difference(&named).collect();
    assert!(missing.is_empty(), "not in a part: {missing:?}");
    for Part { trusted_for, sources } in PARTS {
        let files: Vec<PathBuf> = sources.iter().flat_map(|s| files(&file(s))).collect();
        let lines: usize = files.iter().map(|f| lines(f)).sum();
        all = [all[0] + files.len(), all[1] + lines];
        let folder = Path::new(sources[0]);
        let folder = if sources.len() == 1 { folder } else { folder.parent().expect("a folder") };
        rows.push(format!(
            "| `{}` | {trusted_for} | {} | {lines} |",
            folder.display(),
            files.len()
        ));
    }
    rows.push(format!("| | all | {} | {} |", all[0], all[1]));
    let forward = operations("passes/verify/src/lemmas/mod.rs", "\nfn exact(");
    let gradients = operations("passes/verify/src/gradient/lemmas/mod.rs", "fn cotangents<");
    let counts = format!(
        "{} operations have a lemma of what they compute, {} one of their gradients; all-gather, reduce-scatter and all-reduce have one.",
        forward.len(),
        gradients.len()
    );
    assert!(forward.contains("MatMul") && gradients.contains("MatMul"), "{forward:?}");
    let table = format!(
        "{counts}\n\n| sources | trusted for | files | lines of code |\n|---|---|---|---|\n{}\n",
        rows.join("\n")
    );
    let path = file("docs/verification.md");
    let page = fs::read_to_string(&path).expect("the page");
    let (begin, end) = ("<!-- trusted base: generated -->\n", "<!-- end of trusted base -->");
    let (head, rest) = page.split_once(begin).expect("the page has a place for the table");
    let (_, tail) = rest.split_once(end).expect("the table ends");
    expect_test::expect_file![path].assert_eq(&format!("{head}{begin}\n{table}\n{end}{tail}"));
}
