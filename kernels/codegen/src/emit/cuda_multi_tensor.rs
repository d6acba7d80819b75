//! Several pointwise regions in one launch on CUDA.
//!
//! Regions with equal text are one class: their code is there once, in a grid-stride loop over the tiles of all of them. Of a tile's
//! number, the region follows, and from it, by a binary search whose branches all threads of a block take alike, the addresses of what
//! the regions do not share. Values that depend on shared scalars alone are computed once per thread, before the loop.
//!
//! Source: the multi-tensor kernels of NVIDIA Apex (`multi_tensor_apply`), which PyTorch's fused optimizers follow.

use super::cuda_function::{CudaFunction, Launch, register, thread_and_block, vector_width};
use super::cuda_pointwise::{THREADS, tile, vectors_of_thread};
use super::expr::Expr;
use super::load_store::Memory;
use super::point::Emitter;
use super::region::{Program, analyze};
use super::text::Val;
use crate::error::Unsupported;
use frit_ir::ops::FusionKind;
use frit_ir::{Graph, GraphError, NodeId, Op, Origin, OutputKind, Region, TensorType, ValueId};
use std::collections::{HashMap, HashSet};

/// Operands and results of a kernel, at most: `ptxas` keeps the addresses of all in registers, and blocks that take many
/// leave too few others to keep the memory busy.
const MAX_POINTERS: usize = 64;

/// Regions with equal text.
struct Class {
    program: Program,
    /// Of each region, the position of its operands and results among those of the whole.
    regions: Vec<Vec<usize>>,
}

/// The kernel of all regions of a body, and the types of its operands and results.
pub(crate) fn emit(
    body: &Graph,
    symbol: &str,
) -> Result<(CudaFunction, [Vec<TensorType>; 2]), Unsupported> {
    let of = |v: &ValueId| body.ty(*v).clone();
    let inputs = inputs(body);
    let results: Vec<ValueId> = body.outputs.iter().map(|o| o.value).collect();
    let types = [inputs.iter().map(of).collect::<Vec<_>>(), results.iter().map(of).collect()];
    let n = inputs.len() + results.len();
    if n > MAX_POINTERS {
        return Err(Unsupported::new("fusion", "it has too many operands"));
    }
    let (mut text, mut tiles, mut next) = (String::new(), 1, n);
    for (number, class) in classes(body, &inputs)?.iter().enumerate() {
        let (of_class, n_tiles) = class_text(class, number, &mut next);
        text.push_str(&of_class);
        tiles = tiles.max(n_tiles);
    }
    let arguments: Vec<String> = types
        .iter()
        .flatten()
        .enumerate()
        .map(|(i, ty)| format!("%arg{i}: {}", super::load_store::memref(ty, Memory::CUDA)))
        .collect();
    let text = format!("func.func @{symbol}({}) {{\n{text}return\n}}\n", arguments.join(", "));
    let launch = Launch {
        symbol: symbol.into(),
        block: THREADS,
        grid: [tiles, 1],
        shared_bytes: 0,
        grid_stride: true,
    };
    Ok((CudaFunction { text, launches: vec![launch], scratch_bytes: 0 }, types))
}

fn inputs(body: &Graph) -> Vec<ValueId> {
    let leaves = body.nodes().filter(|(_, n)| matches!(n.op, Op::Input(_)));
    leaves.map(|(_, n)| n.outputs[0]).collect()
}

/// The regions of a body by their text, classes and regions in order of appearance.
fn classes(body: &Graph, inputs: &[ValueId]) -> Result<Vec<Class>, Unsupported> {
    let mut classes: Vec<Class> = Vec::new();
    let mut known: HashMap<String, usize> = HashMap::new();
    for results in regions(body) {
        let (region, operands) = region(body, &results)
            .map_err(|e| Unsupported::new("fusion", format!("it cannot be cut: {e}")))?;
        let place = |v: &ValueId| inputs.iter().position(|input| input == v);
        let mut at: Vec<usize> = operands.iter().filter_map(place).collect();
        at.extend(results.iter().map(|r| inputs.len() + r));
        match known.get(&region.to_string()) {
            Some(&class) => classes[class].regions.push(at),
            None => {
                known.insert(region.to_string(), classes.len());
                let program = analyze(&region, FusionKind::Pointwise)?;
                classes.push(Class { program, regions: vec![at] });
            }
        }
    }
    Ok(classes)
}

/// The results of each region: those are of one region that depend on a computed value of more than one element.
fn regions(body: &Graph) -> Vec<Vec<usize>> {
    let mut regions: Vec<(HashSet<NodeId>, Vec<usize>)> = Vec::new();
    for (i, output) in body.outputs.iter().enumerate() {
        let below: HashSet<NodeId> = below(body, &[output.value])
            .into_iter()
            .filter(|id| {
                let node = body.node(*id);
                !node.op.is_leaf() && node.outputs.iter().any(|v| body.ty(*v).shape.numel() > 1)
            })
            .collect();
        let (mut nodes, mut results) = (below, vec![i]);
        regions.retain_mut(|(others, earlier)| {
            let apart = others.is_disjoint(&nodes);
            if !apart {
                nodes.extend(others.drain());
                results.append(earlier);
            }
            apart
        });
        results.sort_unstable();
        regions.push((nodes, results));
    }
    let mut regions: Vec<Vec<usize>> = regions.into_iter().map(|(_, results)| results).collect();
    regions.sort_unstable();
    regions
}

/// The nodes on which values depend, operands first.
fn below(body: &Graph, values: &[ValueId]) -> Vec<NodeId> {
    let (mut stack, mut seen) = (values.to_vec(), HashSet::new());
    while let Some(value) = stack.pop() {
        let id = body.value(value).def;
        if seen.insert(id) {
            stack.extend(&body.node(id).inputs);
        }
    }
    body.order().iter().copied().filter(|id| seen.contains(id)).collect()
}

/// The body of one region, and its operands in order of first use.
fn region(body: &Graph, results: &[usize]) -> Result<(Graph, Vec<ValueId>), GraphError> {
    let values: Vec<ValueId> = results.iter().map(|r| body.outputs[*r].value).collect();
    let mut region = Graph::new("region");
    let (mut map, mut operands): (HashMap<ValueId, ValueId>, _) = (HashMap::new(), Vec::new());
    let add = |region: &mut Graph, op: Op, inputs: &[ValueId]| {
        region.add(op, inputs, Origin::none(), Region::Forward)
    };
    for id in below(body, &values) {
        let node = body.node(id);
        if matches!(node.op, Op::Input(_)) {
            continue;
        }
        for &value in &node.inputs {
            if map.contains_key(&value) {
                continue;
            }
            let name = operands.len().to_string();
            let input = frit_ir::ops::Input { name, ty: body.ty(value).clone() };
            map.insert(value, add(&mut region, Op::Input(input), &[])?[0]);
            operands.push(value);
        }
        let inputs: Vec<ValueId> = node.inputs.iter().map(|v| map[v]).collect();
        let made = add(&mut region, node.op.clone(), &inputs)?;
        map.extend(node.outputs.iter().copied().zip(made));
    }
    for (i, value) in values.iter().enumerate() {
        region.add_output(&i.to_string(), map[value], OutputKind::Result);
    }
    Ok((region, operands))
}

/// The code of a class, in a block of its own, and the number of its tiles. `next` is the first number that no argument
/// has.
fn class_text(class: &Class, number: usize, next: &mut usize) -> (String, usize) {
    let Class { program, regions } = class;
    let width = vector_width(program);
    let mut e = Emitter::new(program, width, Memory::CUDA);
    let varies: Vec<bool> =
        (0..program.types.len()).map(|i| regions.iter().any(|r| r[i] != regions[0][i])).collect();
    for (i, varies) in varies.iter().enumerate() {
        e.arguments[i] = regions[0][i];
        if *varies {
            e.arguments[i] = *next;
            *next += 1;
        }
    }
    let n = program.rows() * (program.cols() / width);
    let per_thread = vectors_of_thread(program, width, n * regions.len());
    let tiles = n.div_ceil(THREADS * per_thread);
    let all = tiles * regions.len();
    let (thread, block) = thread_and_block(&mut e);
    let of_region = depends_on_region(program, &varies);
    e.prepare_uniform(|id| !of_region[id.index()]);
    let (end, step) = (e.t.index(all), register(&mut e, "nctaid.x"));
    e.for_loop([block, end, step], &[], |e, index, _| {
        let per_region = e.t.index(tiles);
        let which = e.t.same("arith.divui", &[index, per_region]);
        let index = e.t.same("arith.remui", &[index, per_region]);
        let chosen: Vec<usize> = (0..varies.len()).filter(|i| varies[*i]).collect();
        if !chosen.is_empty() {
            let names: Vec<String> =
                chosen.iter().map(|i| format!("%arg{}", e.arguments[*i])).collect();
            choose(e, class, &chosen, (which, 0..regions.len()), &names);
        }
        e.scope(|e| {
            e.prepare_uniform(|_| true);
            tile(e, thread, index, per_thread, n);
        });
        vec![]
    });
    // Names of one block are unknown to the next.
    let text = format!(
        "%first{number} = nvvm.read.ptx.sreg.ctaid.x : i32\n\
         %all{number} = arith.constant {all} : i32\n\
         %any{number} = arith.cmpi ult, %first{number}, %all{number} : i32\n\
         scf.if %any{number} {{\n{}}}\n",
        e.t.finish()
    );
    (text, all)
}

/// For each expression, whether it depends on an operand that the regions do not share.
fn depends_on_region(program: &Program, varies: &[bool]) -> Vec<bool> {
    let mut depends: Vec<bool> = Vec::new();
    for id in program.dag.ids() {
        let own = match program.dag.get(id) {
            Expr::Load { operand, .. } | Expr::Pick { operand, .. } => varies[*operand],
            _ => false,
        };
        let below = program.dag.operands(id).iter().any(|o| depends[o.index()]);
        depends.push(own || below);
    }
    depends
}

/// Defines `names` as the operands `chosen` of the region whose number `which` is, one of `range`.
fn choose(
    e: &mut Emitter<'_>,
    class: &Class,
    chosen: &[usize],
    (which, range): (Val, std::ops::Range<usize>),
    names: &[String],
) {
    let types: Vec<String> = chosen.iter().map(|i| e.buffer(*i).ty(Memory::CUDA)).collect();
    let middle = range.start + range.len() / 2;
    let limit = e.t.index(middle);
    let below = e.t.cmpi("ult", which, limit);
    e.t.line(format_args!("{} = scf.if {below} -> ({}) {{", names.join(", "), types.join(", ")));
    for (half, ends) in [(range.start..middle, "} else {"), (middle..range.end, "}")] {
        let values: Vec<String> = match half.len() {
            1 => chosen.iter().map(|i| format!("%arg{}", class.regions[half.start][*i])).collect(),
            n => {
                let inner = (0..chosen.len()).map(|i| format!("%of{}_{n}_{i}", half.start));
                let inner: Vec<String> = inner.collect();
                choose(e, class, chosen, (which, half), &inner);
                inner
            }
        };
        e.t.line(format_args!("scf.yield {} : {}", values.join(", "), types.join(", ")));
        e.t.line(format_args!("{ends}"));
    }
}
