//! Every rule keeps what it claims, and docs/verification.md lists them.

use super::Solver;
use super::elements::Elements;
use super::encode::{Encoder, OTHER_SIZES, SIZES, size_names};
use super::pattern::{Sizes, graph, instances};
use super::rules::{Rule, all, describe, side_by_side};
use crate::rule::Claim;
use easy_smt::Response;
use frit_ir::interpret::{Options, leaf_key, run};
use frit_ir::ops::UnaryFn;
use frit_ir::{DType, Graph, Op, Origin, Region, Tensor};
use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

/// The reading of elements and the left sides of a claim that the solver is asked about.
fn obligation(claim: &Claim) -> Option<(Elements, &'static [&'static str])> {
    match claim {
        Claim::Bits(before) => Some((Elements::Any, before)),
        Claim::Floats(before) => Some((Elements::Floats, before)),
        Claim::Reals(before) => Some((Elements::Reals, before)),
        Claim::Tested { .. } | Claim::Approximate => None,
    }
}

/// The instances of the left sides to which the rule applies, with what it makes of them.
fn applications(rule: &Rule, before: &[&str]) -> Result<Vec<(String, Graph, Graph)>, String> {
    let mut found = Vec::new();
    for pattern in before {
        let applied = found.len();
        for instance in instances(pattern) {
            let graph = graph(&instance, SIZES).map_err(|e| format!("{instance}: {e}"))?;
            if let Some(after) = rule.apply(&graph) {
                found.push((instance, graph, after));
            }
        }
        if found.len() == applied {
            return Err(format!("does not apply to {pattern}"));
        }
    }
    Ok(found)
}

/// That the rule makes the same expression of other sizes.
fn is_generic(rule: &Rule, instance: &str, after: &Graph) -> Result<(), String> {
    let text = |graph: &Graph, sizes| describe(graph, graph.outputs[0].value, &size_names(sizes));
    let other = graph(instance, OTHER_SIZES).map_err(|e| format!("{instance}: {e}"))?;
    let other = rule.apply(&other).map(|other| text(&other, OTHER_SIZES));
    let here = text(after, SIZES);
    match other.as_ref() == Some(&here) {
        true => Ok(()),
        false => Err(format!("{instance}: {here}, but at other sizes {other:?}")),
    }
}

fn prove(
    solver: &mut Solver,
    elements: Elements,
    before: &Graph,
    after: &Graph,
) -> Result<(), String> {
    let (joined, roots) = side_by_side(before, after);
    let [x, y] = roots.map(|v| joined.ty(v));
    if x != y {
        return Err(format!("{x} became {y}"));
    }
    match Encoder::differ(solver, &joined, elements, roots) {
        Response::Unsat => Ok(()),
        Response::Sat => Err("differs".into()),
        Response::Unknown => Err("the solver has no answer".into()),
    }
}

/// That the opposite is not proved, too: what is assumed has no contradiction.
fn is_consistent(
    solver: &mut Solver,
    elements: Elements,
    before: &Graph,
    after: &Graph,
) -> Result<(), String> {
    let (mut joined, [x, y]) = side_by_side(before, after);
    let f = if joined.ty(y).dtype == DType::Bool { UnaryFn::Not } else { UnaryFn::Neg };
    let wrong = joined.add1(Op::Unary(f), &[y], Origin::none(), Region::Forward);
    let wrong = wrong.map_err(|e| e.to_string())?;
    match Encoder::differ(solver, &joined, elements, [x, wrong]) {
        Response::Unsat => Err("the opposite is proved, too".into()),
        _ => Ok(()),
    }
}

fn prove_all(pass: &str) {
    let Some(mut solver) = Solver::find() else { return };
    let mut wrong = Vec::new();
    let start = Instant::now();
    for rule in all().iter().filter(|rule| rule.pass == pass) {
        let Some((elements, before)) = obligation(&rule.statement.claim) else { continue };
        let (name, begin) = (rule.statement.name, Instant::now());
        let found = applications(rule, before).unwrap_or_else(|e| {
            wrong.push(format!("{name}: {e}"));
            Vec::new()
        });
        for (n, (instance, before, after)) in found.iter().enumerate() {
            let result = is_generic(rule, instance, after)
                .and_then(|()| prove(&mut solver, elements, before, after))
                .and_then(|()| match n == 0 {
                    true => is_consistent(&mut solver, elements, before, after),
                    false => Ok(()),
                });
            if let Err(e) = result {
                let after = describe(after, after.outputs[0].value, &size_names(SIZES));
                wrong.push(format!("{name}: {instance} = {after}: {e}"));
            }
        }
        let (n, time) = (found.len(), begin.elapsed().as_secs_f64());
        eprintln!("{name}: {n} cases in {time:.2} s");
    }
    eprintln!("{pass}: {:.1} s", start.elapsed().as_secs_f64());
    assert!(wrong.is_empty(), "{} rules or cases of {pass}:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn canonicalize_is_proved() {
    prove_all("canonicalize");
}

#[test]
fn raise_is_proved() {
    prove_all("raise");
}

#[test]
fn simplify_is_proved() {
    prove_all("simplify");
}

/// Instances of each left side that are interpreted.
const INTERPRETED: usize = 24;

/// Numbers of which some are hard to keep.
const HARD: [f64; 8] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 0.0, 1e-40, 3e38, 1.0];

fn feeds(graph: &Graph, random: &mut fastrand::Rng, hard: bool) -> HashMap<String, Tensor> {
    let mut feeds = HashMap::new();
    for (_, node) in graph.nodes() {
        let Some(name) = leaf_key(&node.op) else { continue };
        let ty = graph.ty(node.outputs[0]).clone();
        let n = ty.shape.numel();
        let tensor = if ty.dtype.is_float() {
            let mut number = || match hard && random.u8(..4) == 0 {
                true => HARD[random.usize(..HARD.len())],
                false => random.f64() * 4.0 - 2.0,
            };
            Tensor::floats(ty.dtype, ty.shape, (0..n).map(|_| number()).collect())
        } else {
            // Labels are classes; any other integer may be negative.
            let label = name == "l";
            let number = |_| if label || random.bool() { 0 } else { random.i64(-1..2) };
            Tensor::ints(ty.dtype, ty.shape, (0..n).map(number).collect())
        };
        feeds.insert(name, tensor);
    }
    feeds
}

#[test]
fn rules_keep_what_they_claim_at_small_sizes() {
    let mut random = fastrand::Rng::with_seed(20);
    let mut compared: BTreeMap<&str, usize> = BTreeMap::new();
    for rule in all() {
        let name = rule.statement.name;
        let Some((_, before)) = obligation(&rule.statement.claim) else { continue };
        for pattern in before {
            let mut all = instances(pattern);
            random.shuffle(&mut all);
            for (instance, n) in all.iter().cycle().zip(0..INTERPRETED) {
                // Slices fit if each size is the double of the one before.
                let sizes: Sizes = match n % 4 {
                    0 => std::array::from_fn(|i| 1 << i),
                    _ => std::array::from_fn(|_| random.usize(1..4)),
                };
                let Ok(before) = graph(instance, sizes) else { continue };
                let Some(mut after) = rule.apply(&before) else { continue };
                after.sort().expect("there is no cycle");
                let bits = rule.statement.claim.is_bits();
                let feeds = feeds(&before, &mut random, bits);
                let evaluate = |graph: &Graph| run(graph, &feeds, Options::default());
                let Ok(x) = evaluate(&before) else { continue };
                let y = evaluate(&after).unwrap_or_else(|e| panic!("{name}: {instance}: {e}"));
                let (x, y) = (&x[0].1, &y[0].1);
                assert_eq!(x.ty, y.ty, "{name}: {instance}");
                for (x, y) in x.to_f64s().into_iter().zip(y.to_f64s()) {
                    let same = x.to_bits() == y.to_bits() || (x.is_nan() && y.is_nan());
                    let close = !bits && (x - y).abs() <= 1e-4 * (1.0 + x.abs());
                    assert!(same || close, "{name}: {instance} at {sizes:?}: {x} became {y}");
                }
                *compared.entry(name).or_default() += 1;
            }
        }
        assert!(compared.get(name).is_some_and(|n| *n >= 4), "{name}: {compared:?}");
    }
}

#[test]
fn verification_md_lists_the_rules() {
    let rows: Vec<String> = all().iter().map(row).collect();
    let of = |f: fn(&Claim) -> bool| all().iter().filter(|r| f(&r.statement.claim)).count();
    let counts = format!(
        "{} rules: {} proved for elements of any kind, {} over bit-vectors, {} over the reals, {} by exhaustive test, {} approximate.",
        rows.len(),
        of(|c| matches!(c, Claim::Bits(_))),
        of(|c| matches!(c, Claim::Floats(_))),
        of(|c| matches!(c, Claim::Reals(_))),
        of(|c| matches!(c, Claim::Tested { .. })),
        of(|c| matches!(c, Claim::Approximate)),
    );
    let table = format!(
        "{}\n\n| pass | rule | states | kept | proof |\n|---|---|---|---|---|\n{}\n",
        counts,
        rows.join("\n")
    );
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/verification.md");
    let page = std::fs::read_to_string(path).expect("the page is there");
    let (begin, end) = ("<!-- rules: generated -->\n", "<!-- end of rules -->");
    let (head, rest) = page.split_once(begin).expect("the page has a place for the table");
    let (_, tail) = rest.split_once(end).expect("the table ends");
    let expected = format!("{head}{begin}\n{table}\n{end}{tail}");
    expect_test::expect_file![path].assert_eq(&expected);
}

fn row(rule: &Rule) -> String {
    let statement = &rule.statement;
    let (kept, proof) = match statement.claim {
        Claim::Bits(_) => ("bits", "Z3, any elements".to_string()),
        Claim::Floats(_) => ("bits", "Z3, bit-vectors".to_string()),
        Claim::Reals(_) => ("real numbers", "Z3, reals".to_string()),
        Claim::Tested { bits, test, why } => {
            let kept = if bits { "bits" } else { "real numbers" };
            (kept, format!("test `{test}`: {why}"))
        }
        Claim::Approximate => ("rounded otherwise", "none: off unless asked for".to_string()),
    };
    let cases = match obligation(&statement.claim) {
        Some((_, before)) => {
            let n = applications(rule, before).expect("the rule applies").len();
            format!(", {n} case{}", if n == 1 { "" } else { "s" })
        }
        None => String::new(),
    };
    let equation = statement.equation.replace('|', "\\|");
    format!("| `{}` | `{}` | {equation} | {kept} | {proof}{cases} |", rule.pass, statement.name)
}
