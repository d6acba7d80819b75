//! How the results of an operation scale with its operands: a property of the function that it computes.

/// How results depend on operands that carry a factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Linear {
    /// On the sum of linear terms in these operands, by index; no other may carry a factor.
    In(&'static [usize]),
    /// On the sum of all operands.
    InAll,
    /// On the product: linear in each operand.
    InEach,
    /// Not linearly on any.
    No,
}

impl Linear {
    /// The first operand alone: data, or the cotangent of a gradient operation.
    pub(crate) const FIRST: Linear = Linear::In(&[0]);
}

#[cfg(test)]
mod tests {
    use super::Linear::{In, InAll, InEach, No};
    use crate::interpret::{Options, eval_op};
    use crate::ops::{BinaryFn, Cast, Clip, Op, Pad, Reduce, ReduceFn, SumTo, UnaryFn};
    use crate::{DType, Shape, Tensor};

    /// Evaluates 2×2 operands, those at `scaled` multiplied by −2: a maximum of doubled operands is doubled.
    fn results(op: &Op, arity: usize, scaled: &[usize]) -> Vec<f64> {
        let tensors: Vec<Tensor> = (0..arity)
            .map(|i| {
                let times = if scaled.contains(&i) { -2.0 } else { 1.0 };
                let x = [0.5, -1.25, 2.0, -0.75].map(|x| times * (x + 0.125 * i as f64));
                Tensor::floats(DType::F64, [2, 2], x.to_vec())
            })
            .collect();
        let exact = Options { exact: true };
        let found = eval_op(op, &tensors.iter().collect::<Vec<_>>(), exact).expect("evaluates");
        found.iter().flat_map(|t| t.to_f64s()).collect()
    }

    fn scales(op: &Op, arity: usize, scaled: &[usize]) -> bool {
        let (once, then) = (results(op, arity, &[]), results(op, arity, scaled));
        once.iter().zip(&then).all(|(a, b)| (-2.0 * a - b).abs() < 1e-9 * a.abs().max(1.0))
    }

    #[test]
    fn operations_scale_as_they_say() {
        let axes = vec![0];
        let reduce = |f| Op::Reduce(Reduce { f, axes: axes.clone(), keep_dims: false });
        let mut ops: Vec<(Op, usize)> = UnaryFn::ALL
            .iter()
            .filter(|f| **f != UnaryFn::Not)
            .map(|f| (Op::Unary(*f), 1))
            .collect();
        ops.extend(BinaryFn::ALL.iter().map(|f| (Op::Binary(*f), 2)));
        ops.extend(
            [ReduceFn::Sum, ReduceFn::Mean, ReduceFn::Max, ReduceFn::Prod].map(|f| (reduce(f), 1)),
        );
        ops.push((Op::SumTo(SumTo { shape: Shape::from([2]), dtype: None }), 1));
        ops.push((Op::Cast(Cast { to: DType::F64 }), 1));
        ops.push((Op::Clip(Clip { min: Some(-1.0), max: Some(1.0) }), 1));
        let pad = |value| Op::Pad(Pad { low: vec![1, 0], high: vec![0, 0], value });
        ops.extend([(pad(0.0), 1), (pad(1.0), 1)]);
        for (op, arity) in ops {
            let name = op.name();
            match op.linear() {
                In(terms) => assert!(scales(&op, arity, terms), "{name}"),
                InAll => {
                    assert!(scales(&op, arity, &[0, 1]) && !scales(&op, arity, &[0]), "{name}")
                }
                InEach => assert!(scales(&op, arity, &[0]) && scales(&op, arity, &[1]), "{name}"),
                No => assert!(!scales(&op, arity, &[0]), "{name}"),
            }
        }
    }
}
