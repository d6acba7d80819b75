//! Mistakes that a pass or an editor makes, and what finds them: the proof of the plan, `frit verify`, the certificate, `frit audit`.

use super::edit;
use super::trial::{self, Setup};
use crate::audit::options;
use clap::Parser;
use frit::audit::{Options, audit};
use frit::certificate::{Checker, Verdict};
use frit::commands::{Cli, execute};
use frit::compilation::{Observer, Request, compile, imported};
use frit_ir::plan::{Plan, seal};
use frit_ir::{Diagnostic, Graph};
use frit_passes::verify_plan::{verify_evaluation, verify_plan};
use std::cell::RefCell;
use std::collections::HashSet;
use std::path::Path;

/// `Err` with what was found instead.
type Made = Result<(), String>;

pub(super) fn codes(found: &[Diagnostic]) -> Vec<&str> {
    found.iter().map(|d| d.code.as_str()).collect()
}

/// The proof refuses the edited plan with this code.
pub(super) fn by_proof(setup: &Setup, edit: &str, code: &str) -> Made {
    let compiled = setup.compiled("", edit.starts_with("evaluation: "))?;
    let mut plan = compiled.plan.clone();
    let found = match edit.strip_prefix("evaluation: ") {
        Some(edit) => {
            let evaluation = compiled.evaluation.as_ref().ok_or("no evaluation")?;
            let mut evaluation = evaluation.plan.clone();
            edit::apply(&mut evaluation, edit);
            verify_plan(&evaluation).and_then(|()| verify_evaluation(&evaluation, &plan))
        }
        None => {
            edit::apply(&mut plan, edit);
            verify_plan(&plan)
        }
    };
    match found {
        Ok(()) => Err("the edited plan is accepted".into()),
        Err(found) if found.iter().any(|d| d.code == code) => Ok(()),
        Err(found) => Err(format!("found only {:?}", codes(&found))),
    }
}

/// A directory with the plan, or with the edited plan under new digests.
fn written(setup: &Setup, edit: Option<&str>, to: &Path) -> Result<Plan, String> {
    let compiled = setup.compile("")?;
    setup.write(&compiled, to)?;
    let mut plan = compiled.plan.clone();
    if let Some(edit) = edit {
        edit::apply(&mut plan, edit);
        std::fs::write(to.join("plan.json"), seal(&plan.to_json())).expect("written");
    }
    Ok(plan)
}

/// The proof accepts the edited plan, and `frit verify` refuses it with this code.
pub(super) fn by_certificate(setup: &Setup, edit: &str, code: &str) -> Made {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("plan");
    let plan = written(setup, Some(edit), &path)?;
    verify_plan(&plan).map_err(|found| format!("the proof finds {:?}", codes(&found)))?;
    let cli = Cli::try_parse_from(["frit", "verify", path.to_str().expect("text")]);
    match execute(&cli.expect("a command")) {
        Ok(_) => Err("it is certified".into()),
        Err(report) if report.diagnostics.iter().any(|d| d.code == code) => Ok(()),
        Err(report) => Err(format!("found only {:?}", codes(&report.diagnostics))),
    }
}

/// The graph after one pass.
struct After<'a> {
    pass: &'a str,
    /// The graphs of the passes up to it.
    graphs: Vec<(String, Graph)>,
}

impl Observer for After<'_> {
    fn after(&mut self, _: usize, name: &str, graph: &Graph) {
        if self.graphs.last().is_none_or(|(last, _)| last != self.pass) {
            self.graphs.push((name.into(), graph.clone()));
        }
    }
}

/// The certificate shows the pass as it is, and does not if the graph that it makes is edited.
pub(super) fn wrong_pass(setup: &Setup, pass: &str, edit: &str) -> Made {
    let dir = tempfile::tempdir().expect("a directory");
    let (request, config) = setup.request("", false, dir.path())?;
    let request = Request { without_code: true, ..request };
    let mut trace = After { pass, graphs: vec![] };
    compile(&request, &config, &mut trace).map_err(|e| trial::said(&e))?;
    let first = imported(&request, &config).map_err(|e| trial::said(&e))?.graph;
    let mut checker = Checker::new(first.into(), &config).of_training();
    let (last, before) = trace.graphs.split_last().ok_or("no pass")?;
    assert_eq!(last.0, pass, "no such pass");
    for (name, graph) in before {
        checker.check(name, graph);
    }
    let verdict = checker.clone().check(pass, &last.1).verdict;
    if verdict == Verdict::NotShown {
        return Err("the pass is not shown as it is".into());
    }
    let mut graph = last.1.clone();
    edit::apply_to_graph(&mut graph, edit);
    match checker.check(pass, &graph).verdict {
        Verdict::NotShown => Ok(()),
        other => Err(format!("it is {}", other.words())),
    }
}

/// What an audit says of the plan in a directory.
fn audited(plan: &Path) -> Result<Vec<String>, String> {
    let options = Options { directions: 2, ..options(plan) };
    audit(&options).map(|found| found.wrong()).map_err(|e| trial::said(&e))
}

/// An audit finds the plan right and, if it is edited, says this of it.
pub(super) fn by_audit(setup: &Setup, edit: &str, says: &str) -> Made {
    thread_local!(static RIGHT: RefCell<HashSet<String>> = RefCell::default());
    let dir = tempfile::tempdir().expect("a directory");
    let key = setup.key("");
    if !RIGHT.with_borrow(|right| right.contains(&key)) {
        let path = dir.path().join("right");
        written(setup, None, &path)?;
        let wrong = audited(&path)?;
        if !wrong.is_empty() {
            return Err(format!("the plan is wrong as it is: {wrong:?}"));
        }
        RIGHT.with_borrow_mut(|right| right.insert(key));
    }
    let path = dir.path().join("edited");
    written(setup, Some(edit), &path)?;
    let wrong = audited(&path)?;
    match wrong.iter().any(|what| what.contains(says)) {
        true => Ok(()),
        false => Err(format!("it says {wrong:?}")),
    }
}
