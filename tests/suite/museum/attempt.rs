//! An attempt to make a mistake: a model, settings, and what must come of it.

use super::exhibit::strings;
use super::refuted::{self, codes};
use super::trial::{Outcome, Setup};
use super::{edit, trial};
use frit_ir::Severity;
use std::path::Path;
use toml::{Table, Value};

/// One attempt of an exhibit.
pub(super) struct Attempt {
    /// What is tried, for the page.
    pub(super) what: String,
    setup: Setup,
    expected: Expected,
}

/// What must come of an attempt.
enum Expected {
    /// The compilation ends with this code.
    Refused { code: String, says: String },
    /// The plan has this finding; with these other settings, if there are any, it has not.
    Finds { code: String, says: String, unless: String },
    /// The plan is written without a warning.
    Silent,
    /// The proof of the plan refuses the edited plan with this code.
    Edited { edit: String, code: String },
    /// The proof accepts the edited plan, and `frit verify` refuses it with this code.
    NotCertified { edit: String, code: String },
    /// The certificate shows a pass, and does not if the graph that it makes is edited.
    WrongPass { pass: String, edit: String },
    /// An audit says this of the edited plan.
    Audited { edit: String, says: String },
    /// Training computes the same with all of these settings, and something else with those.
    Same { variants: Vec<String>, unlike: Vec<String>, within: f64 },
    /// The losses of the steps are these, not those.
    Losses { right: Vec<f64>, wrong: Vec<f64>, within: f64 },
    /// The gradient is the slope of the loss along random directions.
    Gradient,
    /// Every operation or collective of a name reads or sends this dtype.
    Dtypes(Vec<String>),
    /// A run that ends at a step and is resumed with other settings is the uninterrupted one, bit by bit.
    Resumed { with: String, at: usize },
    /// Training changes only the parameters that end in none of the first names, and those that end in the second.
    Unchanged { kept: Vec<String>, changed: Vec<String> },
    /// The update of all parameters has this norm.
    Moved(f64),
    /// With a learning rate of zero, epochs of this many steps have the same examples in another order.
    Reshuffled(usize),
    /// The run ends with this code.
    Stops { code: String, says: String },
    /// The run warns of this.
    Warns(String),
    /// The run takes all steps without a complaint.
    Runs,
    /// The command is refused, with this message.
    NoCommand { words: String, says: String },
}

/// `Err` with what was found instead.
type Made = Result<(), String>;

fn fails(found: String) -> Made {
    Err(found)
}

impl Attempt {
    pub(super) fn read(name: &str, mut table: Table) -> Attempt {
        let list = |t: &mut Table, key: &str| t.remove(key).map_or(vec![], |v| strings(name, &v));
        let text = |t: &mut Table, key: &str| match t.remove(key) {
            None => String::new(),
            Some(Value::String(text)) => text,
            Some(other) => panic!("{name}: `{key}` is {other}"),
        };
        let numbers = |t: &mut Table, key: &str| match t.remove(key) {
            None => vec![],
            Some(Value::Array(items)) => {
                items.iter().map(|v| v.as_float().expect("a number")).collect()
            }
            Some(other) => panic!("{name}: `{key}` is {other}"),
        };
        let number = |t: &mut Table, key: &str| match t.remove(key) {
            None => 0.0,
            Some(Value::Float(x)) => x,
            Some(Value::Integer(x)) => x as f64,
            Some(other) => panic!("{name}: `{key}` is {other}"),
        };
        let t = &mut table;
        let what = text(t, "what");
        let changes = list(t, "change");
        assert!(changes.len().is_multiple_of(2), "{name}: `change` is pairs of texts");
        let setup = Setup {
            model: text(t, "model"),
            changes: changes.chunks(2).map(|c| (c[0].clone(), c[1].clone())).collect(),
            toml: text(t, "toml"),
            with: text(t, "with"),
            data: list(t, "data"),
        };
        let within = number(t, "within");
        let says = text(t, "says");
        let key = |t: &Table| {
            let kinds = [
                "refused",
                "finds",
                "silent",
                "edit",
                "verify",
                "pass",
                "audit",
                "same",
                "losses",
                "gradient",
                "dtypes",
                "resume",
                "unchanged",
                "moved",
                "reshuffled",
                "stops",
                "warns",
                "runs",
                "frit",
            ];
            let found: Vec<_> = kinds.into_iter().filter(|k| t.contains_key(*k)).collect();
            assert_eq!(found.len(), 1, "{name}: an attempt expects one of {kinds:?}");
            found[0]
        };
        let expected = match key(t) {
            "refused" => Expected::Refused { code: text(t, "refused"), says },
            "finds" => Expected::Finds { code: text(t, "finds"), unless: text(t, "unless"), says },
            "edit" => Expected::Edited { edit: text(t, "edit"), code: text(t, "code") },
            "verify" => Expected::NotCertified { edit: text(t, "verify"), code: text(t, "code") },
            "pass" => {
                let (words, at) = (text(t, "pass"), format!("{name}: `PASS: EDIT`"));
                let (pass, edit) = words.split_once(": ").expect(&at);
                Expected::WrongPass { pass: pass.into(), edit: edit.into() }
            }
            "audit" => Expected::Audited { edit: text(t, "audit"), says },
            "warns" => Expected::Warns(text(t, "warns")),
            "same" => {
                Expected::Same { variants: list(t, "same"), unlike: list(t, "unlike"), within }
            }
            "losses" => {
                Expected::Losses { right: numbers(t, "losses"), wrong: numbers(t, "wrong"), within }
            }
            "dtypes" => Expected::Dtypes(list(t, "dtypes")),
            "resume" => Expected::Resumed { with: text(t, "resume"), at: number(t, "at") as usize },
            "unchanged" => {
                Expected::Unchanged { kept: list(t, "unchanged"), changed: list(t, "changed") }
            }
            "moved" => Expected::Moved(number(t, "moved")),
            "reshuffled" => Expected::Reshuffled(number(t, "reshuffled") as usize),
            "stops" => Expected::Stops { code: text(t, "stops"), says },
            "frit" => Expected::NoCommand { words: text(t, "frit"), says },
            kind => {
                assert_eq!(t.remove(kind), Some(Value::Boolean(true)), "{name}: `{kind}`");
                match kind {
                    "silent" => Expected::Silent,
                    "gradient" => Expected::Gradient,
                    _ => Expected::Runs,
                }
            }
        };
        assert!(table.is_empty(), "{name}: unknown keys {:?}", table.keys().collect::<Vec<_>>());
        assert!(!what.is_empty(), "{name}: an attempt says `what`");
        Attempt { what, setup, expected }
    }

    /// The line of the page: what is tried and what comes of it.
    pub(super) fn described(&self) -> String {
        let comes = match &self.expected {
            Expected::Refused { code, .. } => format!("`frit compile` refuses it ({code})"),
            Expected::Finds { code, .. } => format!("`frit compile` warns ({code})"),
            Expected::Silent => "nothing is said".into(),
            Expected::Edited { code, .. } => format!("`verify_plan` refuses the plan ({code})"),
            Expected::NotCertified { code, .. } => {
                format!("`verify_plan` accepts the plan, and `frit verify` refuses it ({code})")
            }
            Expected::WrongPass { pass, .. } => {
                format!("the certificate does not show the pass `{pass}`")
            }
            Expected::Audited { .. } => "`frit audit` finds it wrong (E116)".into(),
            Expected::Same { within, .. } if *within == 0.0 => "the same bits".into(),
            Expected::Same { within, .. } => format!("the same within {within:e}"),
            Expected::Losses { .. } => "the right losses, not the wrong ones".into(),
            Expected::Gradient => {
                "the gradient is the slope of the loss, along 3 directions, within 0.5 %".into()
            }
            Expected::Dtypes(dtypes) => dtypes.join(", "),
            Expected::Resumed { .. } => "the same bits as without the interruption".into(),
            Expected::Unchanged { kept, .. } if kept.is_empty() => "they do".into(),
            Expected::Unchanged { .. } => "the others change, these do not".into(),
            Expected::Moved(norm) => format!("the update has norm {norm}"),
            Expected::Reshuffled(_) => "every epoch has all examples, in another order".into(),
            Expected::Stops { code, .. } => format!("`frit run` ends with an error ({code})"),
            Expected::Warns(_) => "`frit run` warns before the first step".into(),
            Expected::Runs => "it trains, and nothing is said".into(),
            Expected::NoCommand { .. } => "there is no such command".into(),
        };
        format!("{}: {comes}", self.what)
    }

    /// Makes the attempt.
    pub(super) fn make(&self) -> Made {
        let setup = &self.setup;
        match &self.expected {
            Expected::Refused { code, says } => match setup.compile("") {
                Ok(_) => fails("it was compiled".into()),
                Err(report) => said(&report, code, says),
            },
            Expected::Finds { code, says, unless } => {
                let findings = |with: &str| setup.compile(with).map(|c| c.plan.lints.clone());
                let found = findings("")?;
                let of = |d: &&frit_ir::Diagnostic| d.code == *code;
                let Some(finding) = found.iter().find(of) else {
                    return fails(format!("found only {:?}", codes(&found)));
                };
                if finding.severity != Severity::Warning
                    || !finding.to_string().contains(says.as_str())
                {
                    return fails(format!("it says {finding}"));
                }
                if unless.is_empty() {
                    return Ok(());
                }
                match findings(unless)?.iter().find(of) {
                    Some(finding) => fails(format!("it is found also with {unless}: {finding}")),
                    None => Ok(()),
                }
            }
            Expected::Silent => {
                let lints = setup.compile("")?.plan.lints.clone();
                match lints.iter().find(|d| d.severity != Severity::Info) {
                    Some(finding) => fails(format!("it is noticed: {finding}")),
                    None => Ok(()),
                }
            }
            Expected::Edited { edit, code } => refuted::by_proof(setup, edit, code),
            Expected::NotCertified { edit, code } => refuted::by_certificate(setup, edit, code),
            Expected::WrongPass { pass, edit } => refuted::wrong_pass(setup, pass, edit),
            Expected::Audited { edit, says } => refuted::by_audit(setup, edit, says),
            Expected::Same { variants, unlike, within } => {
                let train = |with: &String| setup.train(with, Path::new(""));
                let first = train(&variants[0])?;
                for with in &variants[1..] {
                    let difference = train(with)?.difference(&first);
                    if difference > *within {
                        return fails(format!("with {with} it differs by {difference:e}"));
                    }
                }
                for with in unlike {
                    let difference = train(with)?.difference(&first);
                    if difference <= 10.0 * within {
                        return fails(format!("with {with} it differs only by {difference:e}"));
                    }
                }
                Ok(())
            }
            Expected::Losses { right, wrong, within } => {
                let losses = setup.train("", Path::new(""))?.losses;
                let off = |those: &[f64]| {
                    let off = losses.iter().zip(those).map(|(a, b)| (a - b).abs() / b.abs());
                    off.fold(0.0, f64::max)
                };
                if losses.len() != right.len() || off(right) > *within {
                    return fails(format!("the losses are {losses:?}"));
                }
                if wrong.len() != right.len() || off(wrong) <= 10.0 * within {
                    return fails(format!("{losses:?} are hardly other losses than {wrong:?}"));
                }
                Ok(())
            }
            Expected::Gradient => trial::gradient(setup),
            Expected::Dtypes(dtypes) => {
                let compiled = setup.compile("")?;
                dtypes.iter().try_for_each(|wanted| {
                    let (of, dtype) = wanted.split_once(' ').ok_or("`NAME DTYPE`")?;
                    let found = edit::dtypes(&compiled.plan, of);
                    let all = !found.is_empty() && found.iter().all(|d| d == dtype);
                    if all { Ok(()) } else { Err(format!("{of}: {found:?}")) }
                })
            }
            Expected::Resumed { with, at } => trial::resumed(setup, with, *at),
            Expected::Unchanged { kept, changed } => {
                let outcome = setup.train("", Path::new(""))?;
                let before = setup.initial("")?;
                let ends = |name: &str, names: &[String]| names.iter().any(|n| name.ends_with(n));
                let is_changed = |name: &String| outcome.params[name] != before[name];
                let wrong = outcome.params.keys().find(|name| {
                    ends(name, kept) && is_changed(name) || ends(name, changed) && !is_changed(name)
                });
                let known = |names: &[String]| {
                    names
                        .iter()
                        .all(|n| outcome.params.keys().any(|name| name.ends_with(n.as_str())))
                };
                match wrong {
                    Some(name) => fails(format!("{name} changed: {}", is_changed(name))),
                    None if !known(kept) || !known(changed) => {
                        fails("no parameter of these names".into())
                    }
                    None => Ok(()),
                }
            }
            Expected::Moved(norm) => {
                let moved = setup.train("", Path::new(""))?.moved(&setup.initial("")?);
                match (moved / norm - 1.0).abs() < 1e-4 {
                    true => Ok(()),
                    false => fails(format!("the update has norm {moved}")),
                }
            }
            Expected::Reshuffled(steps) => {
                let losses = setup.train("", Path::new(""))?.losses;
                let (first, second) = losses.split_at(*steps);
                let sum = |l: &[f64]| l.iter().sum::<f64>();
                let same_examples = (sum(first) - sum(second)).abs() < 1e-5 * sum(first).abs();
                match same_examples && first != second && first.len() == second.len() {
                    true => Ok(()),
                    false => fails(format!("the losses are {losses:?}")),
                }
            }
            Expected::Stops { code, says } => match setup.train("", Path::new("")) {
                Ok(_) => fails("it ran".into()),
                Err(message) => said(&message, code, says),
            },
            Expected::Warns(what) => {
                let warnings = setup.train("", Path::new(""))?.warnings;
                match warnings.iter().any(|w| w.contains(what.as_str())) {
                    true => Ok(()),
                    false => fails(format!("it warns of {warnings:?}")),
                }
            }
            Expected::Runs => match setup.train("", Path::new(""))? {
                Outcome { warnings, .. } if warnings.is_empty() => Ok(()),
                Outcome { warnings, .. } => fails(format!("it warns: {warnings:?}")),
            },
            Expected::NoCommand { words, says } => {
                match trial::command(&words.split(' ').collect::<Vec<_>>()) {
                    Ok(said) => fails(format!("it says {said}")),
                    Err(message) if message.contains(says.as_str()) => Ok(()),
                    Err(message) => fails(message),
                }
            }
        }
    }
}

fn said(message: &str, code: &str, says: &str) -> Made {
    let right = message.contains(&format!("error[{code}]")) && message.contains(says);
    if right { Ok(()) } else { fails(format!("it says {message}")) }
}
