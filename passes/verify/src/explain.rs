//! Where two terms differ, in words.

use crate::index::{Atom, Ix, Kind};
use crate::term::{Definition, Number, Term, TermId, Terms};

/// The first difference of two terms, written out.
pub(crate) fn difference(t: &Terms, a: TermId, b: TermId) -> String {
    let (a, b) = innermost(t, a, b, 200);
    format!("{} and {}", text(t, a, 4), text(t, b, 4))
}

/// Descends while exactly one part of both terms differs.
fn innermost(t: &Terms, a: TermId, b: TermId, fuel: usize) -> (TermId, TermId) {
    if fuel == 0 {
        return (a, b);
    }
    let only = |x: &[TermId], y: &[TermId]| -> Option<(TermId, TermId)> {
        let left: Vec<TermId> = x.iter().copied().filter(|p| !y.contains(p)).collect();
        let right: Vec<TermId> = y.iter().copied().filter(|p| !x.contains(p)).collect();
        // Of several the first pair that is built alike.
        let alike = |a: &TermId, b: &TermId| {
            t.shape_of(*a) != t.shape_of(*b) && outline(t, *a, 2) == outline(t, *b, 2)
        };
        let pair = left.iter().find_map(|a| Some((*a, *right.iter().find(|b| alike(a, b))?)));
        match (&left[..], &right[..]) {
            (&[a], &[b]) => Some((a, b)),
            _ => pair,
        }
    };
    let parts = |p: &[(TermId, Number)]| p.iter().map(|(t, _)| *t).collect::<Vec<_>>();
    let next = match (t.get(a), t.get(b)) {
        (Term::Sum(x, c), Term::Sum(y, d)) if c == d => only(&parts(x), &parts(y)),
        (Term::Product(x), Term::Product(y)) => only(&parts(x), &parts(y)),
        (Term::Apply(f, x), Term::Apply(g, y)) if f == g && x.len() == y.len() => only(x, y),
        (Term::Defined(d, x), Term::Defined(e, y)) if d != e && x.len() == y.len() => {
            match (&t.definitions[*d as usize], &t.definitions[*e as usize]) {
                (
                    Definition::Reduce { by, bound, body },
                    Definition::Reduce { by: other, bound: sizes, body: second },
                ) if by == other && bound == sizes => Some((*body, *second)),
                (
                    Definition::Opaque { op, operands, .. },
                    Definition::Opaque { op: other, operands: seconds, .. },
                ) if op == other && operands.len() == seconds.len() => {
                    let pairs = operands.iter().zip(seconds);
                    let different: Vec<_> = pairs.filter(|(a, b)| a.0 != b.0).collect();
                    different.first().map(|(a, b)| (a.0, b.0))
                }
                _ => None,
            }
        }
        _ => None,
    };
    match next {
        Some((a, b)) if a != b => innermost(t, a, b, fuel - 1),
        _ => (a, b),
    }
}

/// How a term is built, to a depth.
fn outline(t: &Terms, id: TermId, depth: usize) -> String {
    let bag = |parts: &[(TermId, Number)]| {
        let mut words: Vec<String> =
            parts.iter().map(|(p, _)| outline(t, *p, depth.saturating_sub(1))).collect();
        words.sort_unstable();
        words.join(",")
    };
    match t.get(id) {
        _ if depth == 0 => String::new(),
        Term::Leaf(leaf, _) => format!("leaf{leaf}"),
        Term::Defined(definition, _) => match &t.definitions[*definition as usize] {
            Definition::Reduce { by, body, .. } => {
                format!("{by}({})", outline(t, *body, depth - 1))
            }
            Definition::Opaque { op, .. } => op.name().into(),
        },
        Term::Sum(parts, _) => format!("+{}({})", parts.len(), bag(parts)),
        Term::Product(parts) => format!("*{}({})", parts.len(), bag(parts)),
        Term::Apply(f, _) => f.name.into(),
        Term::Number(_) => "number".into(),
        Term::Index(_) => "index".into(),
        Term::NotNegative(_) => "bound".into(),
    }
}

/// A term in words, to a depth.
pub(crate) fn text(t: &Terms, id: TermId, depth: usize) -> String {
    if depth == 0 {
        return "…".into();
    }
    let list =
        |at: &[Ix]| at.iter().map(|ix| index_text(t, *ix, depth)).collect::<Vec<_>>().join(", ");
    match t.get(id) {
        Term::Number(x) => format!("{}", x.value()),
        Term::Index(ix) => index_text(t, *ix, depth),
        Term::Leaf(leaf, at) => format!("{}[{}]", t.leaves[*leaf as usize], list(at)),
        Term::Defined(definition, at) => match &t.definitions[*definition as usize] {
            Definition::Reduce { by, bound, body } => {
                format!("{by}{bound:?}({})[{}]", text(t, *body, depth - 1), list(at))
            }
            Definition::Opaque { op, result, operands, .. } => {
                let operands: Vec<String> =
                    operands.iter().map(|(o, _)| text(t, *o, depth - 1)).collect();
                format!("{}.{result}({})[{}]", op.name(), operands.join("; "), list(at))
            }
        },
        Term::Sum(parts, constant) => {
            let mut words: Vec<String> = (parts.iter().take(6))
                .map(|(p, f)| match f.value() {
                    1.0 => text(t, *p, depth - 1),
                    f => format!("{f}·{}", text(t, *p, depth - 1)),
                })
                .collect();
            if parts.len() > 6 {
                words.push(format!("({} more)", parts.len() - 6));
            }
            if constant.value() != 0.0 {
                words.push(format!("{}", constant.value()));
            }
            format!("({})", words.join(" + "))
        }
        Term::Product(factors) => {
            let words = factors.iter().map(|(p, e)| match e.value() {
                1.0 => text(t, *p, depth - 1),
                e => format!("{}^{e}", text(t, *p, depth - 1)),
            });
            words.collect::<Vec<_>>().join("·")
        }
        Term::Apply(function, operands) => {
            let words = operands.iter().map(|o| text(t, *o, depth - 1));
            format!("{}({})", function.name, words.collect::<Vec<_>>().join(", "))
        }
        Term::NotNegative(ix) => format!("[{} ≥ 0]", index_text(t, *ix, depth)),
    }
}

fn index_text(t: &Terms, ix: Ix, depth: usize) -> String {
    let affine = t.affine(ix);
    let mut words: Vec<String> = affine
        .atoms
        .iter()
        .map(|&(atom, factor)| {
            let word = match atom {
                Atom::Var(v) => {
                    let letter = match v.kind {
                        Kind::Axis => "i",
                        Kind::Argument => "a",
                        Kind::Bound => "b",
                        Kind::Fresh => "f",
                        Kind::Rank => "rank",
                    };
                    format!("{letter}{}:{}", v.number, v.extent)
                }
                Atom::Div(of, n) => format!("({} div {n})", index_text(t, of, depth)),
                Atom::Mod(of, n) => format!("({} mod {n})", index_text(t, of, depth)),
                Atom::Data(term) => format!("<{}>", text(t, term, depth - 1)),
            };
            if factor == 1 { word } else { format!("{factor}·{word}") }
        })
        .collect();
    if affine.constant != 0 || words.is_empty() {
        words.push(affine.constant.to_string());
    }
    words.join(" + ")
}
