//! Buffers that the forward pass updates, and random generators.

use super::super::updated;
use super::updates::{EXAMPLES, plain, with_gradient};
use super::{Model, Ranks, Tensors, close, floats, random};
use frit_ir::ops::{BinaryFn, Constant, ParamKind, Reduce, ReduceFn, State, StateName};
use frit_ir::{DType, Op, OutputKind, Tensor, TensorType};

/// A model with a running mean, `r ← 0.75·r + 0.25·mean(x)`, and a counter of micro-steps.
fn model() -> Model {
    let mut m = Model::new();
    let x = m.input("x", DType::F32, &[3, 2]);
    let number =
        |m: &mut Model, value| m.op(Op::Constant(Constant { value: Tensor::scalar(value) }), &[]);
    let old = m.param("r", ParamKind::Buffer, TensorType::new(DType::F32, [2]));
    let (keep, mix) = (number(&mut m, 0.75), number(&mut m, 0.25));
    let mean = Reduce { f: ReduceFn::Mean, axes: vec![0], keep_dims: false };
    let mean = m.op(Op::Reduce(mean), &[x]);
    let kept = m.op(Op::Binary(BinaryFn::Mul), &[keep, old]);
    let mixed = m.op(Op::Binary(BinaryFn::Mul), &[mix, mean]);
    let new = m.op(Op::Binary(BinaryFn::Add), &[kept, mixed]);
    m.0.add_output("r", new, OutputKind::Carry(old));
    let counter = m.param("n", ParamKind::Buffer, TensorType::new(DType::I64, [1]));
    let one = m.op(Op::Constant(Constant { value: Tensor::vector_i64(vec![1]) }), &[]);
    let counted = m.op(Op::Binary(BinaryFn::Add), &[counter, one]);
    m.0.add_output("n", counted, OutputKind::Carry(counter));
    let ty = TensorType::new(DType::I64, [5]);
    let state = State { name: StateName::Rng, of: None, ty, init: 0.0, sharded: false };
    m.op(Op::State(state), &[]);
    m
}

#[test]
fn micro_steps_apply_in_turn_and_ranks_are_averaged() {
    let mut rng = fastrand::Rng::with_seed(5);
    for (accumulation, n_ranks) in [(1, 1), (1, 2), (3, 1), (3, 2)] {
        let mut update = plain("sgd");
        (update.accumulation, update.ranks) = (accumulation, n_ranks);
        let capacity = update.capacity * accumulation as f64;
        let graph = updated(&with_gradient(model(), capacity).0, &update).expect("stated");
        let n_averages = graph.nodes().filter(|(_, n)| matches!(n.op, Op::AllReduce(_))).count();
        assert_eq!(n_averages, usize::from(n_ranks > 1), "the counter is the same on all ranks");
        let mut ranks = Ranks::new(graph, n_ranks);
        for states in &mut ranks.states {
            states.insert("r".into(), floats(&[2], &[1.0, -1.0]));
            states.insert("n".into(), Tensor::vector_i64(vec![5]));
            states.insert("rng".into(), Tensor::vector_i64(vec![9, 0, 4, 1, 1]));
        }
        let (mut expected, mut steps) = ([1.0, -1.0], 0);
        for fails in [false, true, false] {
            let mut inputs = Vec::new();
            let mut staged = vec![expected; n_ranks];
            for _ in 0..accumulation {
                let mut of_ranks = Vec::new();
                for staged in &mut staged {
                    let x = random(&mut rng, 6);
                    for (c, r) in staged.iter_mut().enumerate() {
                        *r = 0.75 * *r + 0.25 * (x[c] + x[2 + c] + x[4 + c]) / 3.0;
                    }
                    let d = if fails { f64::NAN } else { 0.5 };
                    of_ranks.push(Tensors::from([
                        ("x".to_string(), floats(&[3, 2], &x)),
                        ("d_w".to_string(), floats(&[2], &[d, 1.0])),
                        ("loss".to_string(), floats(&[], &[1.0])),
                        ("count".to_string(), floats(&[], &[EXAMPLES])),
                    ]));
                }
                inputs.push(of_ranks);
            }
            let metrics = ranks.step(&inputs);
            assert_eq!(metrics["found_inf"] != 0.0, fails);
            if !fails {
                steps += 1;
                let mean = |c: usize| staged.iter().map(|s| s[c]).sum::<f64>() / n_ranks as f64;
                expected = [mean(0), mean(1)];
            }
            for rank in 0..n_ranks {
                close(&ranks.value(rank, "r"), &expected, "running mean");
                let counted = 5.0 + (steps * accumulation) as f64;
                close(&ranks.value(rank, "n"), &[counted], "counter");
            }
        }
        // Skipped steps draw, too.
        let drawn = 4.0 + 3.0 * accumulation as f64;
        close(&ranks.value(0, "rng"), &[9.0, 0.0, drawn, 1.0, 1.0], "generator");
    }
}
