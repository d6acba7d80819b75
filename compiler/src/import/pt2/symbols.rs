//! Sizes that are computed from dynamic ones: as numbers if all of them are known, else as nodes of the graph.

use super::call::{Call, Fault, Scalar, unsupported};
use super::translate::Int;

/// A function of sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Function {
    SizeOfAxis,
    Elements,
    Add,
    Sub,
    Mul,
    FloorDiv,
    Mod,
    Neg,
    Max,
    Min,
}

/// Whether the call only checks what is known already, or computes what only such a call reads.
pub(super) fn is_check(target: &str) -> bool {
    let name = target.strip_prefix("aten.").unwrap_or(target);
    let comparisons = ["eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_"];
    name.starts_with("_assert_")
        || name.starts_with("sym_constrain_range")
        || target.strip_prefix("_operator.").is_some_and(|f| comparisons.contains(&f))
        || matches!(target, "math.trunc" | "torch.sym_not" | "torch._check")
}

/// The function that a target names.
pub(super) fn function(target: &str) -> Option<Function> {
    Some(match target {
        "aten.sym_size.int" => Function::SizeOfAxis,
        "aten.sym_numel.default" => Function::Elements,
        "_operator.add" => Function::Add,
        "_operator.sub" => Function::Sub,
        "_operator.mul" => Function::Mul,
        "_operator.floordiv" => Function::FloorDiv,
        "_operator.mod" => Function::Mod,
        "_operator.neg" => Function::Neg,
        "torch.sym_max" => Function::Max,
        "torch.sym_min" => Function::Min,
        _ => return None,
    })
}

/// The result of such a call.
pub(super) fn compute(call: &mut Call<'_>, f: Function) -> Result<Int, Fault> {
    match f {
        Function::SizeOfAxis => {
            let x = call.tensor("self")?;
            let axis = call.axis(call.int("dim", 0)?, x.dims.len())?;
            return Ok(call.size_of(&x, axis));
        }
        Function::Elements => {
            let x = call.tensor("self")?;
            let sizes = call.shape(&x);
            let mut product = Int::Known(1);
            for size in &sizes {
                product = of(call, Function::Mul, &product, size)?;
            }
            return Ok(product);
        }
        _ => {}
    }
    let mut operands = Vec::new();
    for input in &call.node.inputs {
        operands.push(match call.scalar(&input.name)? {
            Some(Scalar::Int(n)) => Int::Known(n),
            Some(Scalar::Size(name)) => Int::Computed(name),
            _ => return unsupported("a size that is no integer"),
        });
    }
    match (f, &operands[..]) {
        (Function::Neg, [a]) => {
            let a = a.clone();
            of(call, Function::Sub, &Int::Known(0), &a)
        }
        (_, [a, b]) => {
            let (a, b) = (a.clone(), b.clone());
            of(call, f, &a, &b)
        }
        _ => Err(Fault::Damaged(format!("{} operands", operands.len()))),
    }
}

/// A function of two sizes.
pub(super) fn of(call: &mut Call<'_>, f: Function, a: &Int, b: &Int) -> Result<Int, Fault> {
    if let (Int::Known(a), Int::Known(b)) = (a, b) {
        return known(f, *a, *b)
            .map(Int::Known)
            .ok_or_else(|| Fault::Damaged(format!("{f:?} of the sizes {a} and {b} has no value")));
    }
    let (a, b) = (call.size_scalar(a), call.size_scalar(b));
    let name = match f {
        Function::Add => call.add("Add", &[&a, &b]),
        Function::Sub => call.add("Sub", &[&a, &b]),
        Function::Mul => call.add("Mul", &[&a, &b]),
        Function::Max => call.add("Max", &[&a, &b]),
        Function::Min => call.add("Min", &[&a, &b]),
        Function::Mod => call.add("Mod", &[&a, &b]),
        Function::FloorDiv => {
            // ONNX rounds toward zero.
            let rest = call.add("Mod", &[&a, &b]);
            let exact = call.add("Sub", &[&a, &rest]);
            call.add("Div", &[&exact, &b])
        }
        _ => return unsupported("this function of sizes"),
    };
    Ok(Int::Computed(name))
}

/// Python's value.
fn known(f: Function, a: i64, b: i64) -> Option<i64> {
    let floor_mod = |a: i64, b: i64| {
        let rest = a.checked_rem(b)?;
        Some(if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest })
    };
    match f {
        Function::Add => a.checked_add(b),
        Function::Sub => a.checked_sub(b),
        Function::Mul => a.checked_mul(b),
        Function::Max => Some(a.max(b)),
        Function::Min => Some(a.min(b)),
        Function::Mod => floor_mod(a, b),
        Function::FloorDiv => a.checked_sub(floor_mod(a, b)?)?.checked_div(b),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisions_round_down() {
        for (a, b, quotient, rest) in [(7, 2, 3, 1), (-7, 2, -4, 1), (7, -2, -4, -1), (6, 3, 2, 0)]
        {
            assert_eq!(known(Function::FloorDiv, a, b), Some(quotient));
            assert_eq!(known(Function::Mod, a, b), Some(rest));
        }
        assert_eq!(known(Function::FloorDiv, 1, 0), None);
        assert_eq!(known(Function::FloorDiv, i64::MIN, -1), None);
        assert_eq!(known(Function::Mul, i64::MAX, 2), None);
    }
}
