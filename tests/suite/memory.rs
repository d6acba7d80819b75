//! The planned peak against its lower bound, for every test model and strategy.

use crate::support::file;
use clap::Parser;
use frit::commands::{Cli, execute};
use frit::compilation::{Request, predict};
use frit::config::Config;
use frit_ir::Region;
use frit_ir::plan::{
    ALIGNMENT, Action, Arena, BufferId, Entry, KernelKind, Plan, Purpose, TaskId, TiVec,
};
use frit_passes::verify_plan::verify_plan;

/// The given models.
pub(crate) const MODELS: &[&str] = &["mlp", "gpt2", "llama", "bert", "t5", "vit", "resnet", "unet"];

/// Every strategy, with what it needs.
pub(crate) const STRATEGIES: &[&[&str]] = &[
    &["sharding.strategy=full_shard"],
    &["sharding.strategy=shard_grad_op"],
    &["sharding.strategy=shard_optimizer", "run.accumulation=2"],
    &["sharding.strategy=hybrid_shard", "sharding.shard_group=2"],
    &["sharding.strategy=no_shard"],
];

pub(crate) fn predicted(model: &str, settings: &[&str]) -> Plan {
    predicted_with(model, "", settings)
}

/// The same with a configuration file of this text.
pub(crate) fn predicted_with(model: &str, toml: &str, settings: &[&str]) -> Plan {
    let mut settings: Vec<String> = settings.iter().map(|s| s.to_string()).collect();
    settings.extend((model == "unet").then(|| "loss.kind=mse".to_string()));
    let config = Config::parse(toml, "train.toml", &settings).unwrap_or_else(|e| panic!("{e}"));
    let request = Request {
        model: file(&format!("tests/models/{model}/model.onnx")),
        binds: [("batch".to_string(), 2)].into(),
        ..Request::default()
    };
    let plan = predict(&request, &config).unwrap_or_else(|e| panic!("{e}"));
    prove(&plan);
    plan
}

/// Proves a plan that has no machine code yet, as one that is interpreted.
fn prove(plan: &Plan) {
    let mut plan = plan.clone();
    plan.kernels.iter_mut().filter(|k| k.kind() == KernelKind::Generated).for_each(|k| {
        k.entry = Entry::Interpreter;
        k.bind();
    });
    verify_plan(&plan).unwrap_or_else(|e| panic!("{e:?}"));
}

/// Whether the tasks of a plan are complete before others start, whatever the timing: by stream order,
/// waits and phases alone.
struct Order(TiVec<TaskId, Vec<u64>>);

impl Order {
    fn of(plan: &Plan) -> Order {
        let words = plan.tasks.len().div_ceil(64);
        let mut before: TiVec<TaskId, Vec<u64>> = TiVec::new();
        for phase in &plan.phases {
            for i in phase.tasks() {
                let mut known = vec![0; words];
                (0..phase.begin.0).for_each(|j| known[j / 64] |= 1 << (j % 64));
                let same = |j: &TaskId| plan.tasks[*j].stream == plan.tasks[i].stream;
                let previous = phase.begin.until(i).rev().find(same);
                for j in plan.tasks[i].waits.iter().copied().chain(previous) {
                    known.iter_mut().zip(&before[j]).for_each(|(k, b)| *k |= b);
                    known[j.0 / 64] |= 1 << (j.0 % 64);
                }
                before.push(known);
            }
        }
        Order(before)
    }

    fn before(&self, a: TaskId, b: TaskId) -> bool {
        self.0[b][a.0 / 64] >> (a.0 % 64) & 1 == 1
    }
}

/// The tasks that use each buffer of the workspace.
fn accesses(plan: &Plan) -> TiVec<BufferId, Vec<TaskId>> {
    let mut accesses: TiVec<BufferId, Vec<TaskId>> = vec![Vec::new(); plan.buffers.len()].into();
    for (i, task) in plan.tasks.iter_enumerated() {
        for place in task.action.reads().into_iter().chain(task.action.writes()) {
            if plan.buffers[place.buffer].arena == Arena::Workspace {
                accesses[place.buffer].push(i);
            }
        }
    }
    accesses
}

#[test]
fn the_peak_is_within_two_percent_of_its_lower_bound() {
    for model in MODELS {
        for strategy in STRATEGIES {
            // Running statistics of batch norm are not accumulated.
            let fits = |s: &&str| *model != "resnet" || !s.starts_with("run.accumulation");
            let strategy: Vec<&str> = strategy.iter().copied().filter(fits).collect();
            for (compute, ranks) in [("fp32", 2), ("fp32", 4), ("bf16", 2), ("bf16", 4)] {
                let of =
                    [format!("precision.compute={compute}"), format!("sharding.ranks={ranks}")];
                let of = [of[0].as_str(), &of[1]];
                let plan = predicted(model, &[&strategy[..], &of].concat());
                let (peak, bound) = (plan.workspace_bytes, plan.workspace_lower_bound);
                let what = format!("{model} {strategy:?} {compute} on {ranks} ranks");
                assert!(bound <= peak, "{what}: {peak} below {bound}");
                assert!(peak as f64 <= 1.02 * bound as f64, "{what}: {peak} for {bound}");
                // The list is one of the orders that the events allow.
                let live = plan.live().iter().map(|live| live.iter().sum()).max().unwrap_or(0);
                assert!(live > 0 && live <= peak, "{what}: {live} live, {peak} planned");
            }
        }
    }
}

#[test]
fn streams_share_bytes_only_where_events_order_them() {
    let mut shared_by_streams = 0;
    for (model, settings) in [
        ("gpt2", &["sharding.ranks=4"][..]),
        ("llama", &["sharding.ranks=2", "precision.compute=bf16", "memory.recompute=unit"]),
        ("t5", &["sharding.ranks=4", "sharding.strategy=hybrid_shard", "sharding.shard_group=2"]),
        ("vit", &["sharding.ranks=2", "run.accumulation=2", "sharding.no_sync=true"]),
        ("gpt2", &["sharding.ranks=2", "precision.compute=bf16", "memory.offload=parameters"]),
    ] {
        let plan = predicted(model, settings);
        let (order, accesses) = (Order::of(&plan), accesses(&plan));
        let used: Vec<BufferId> = accesses.keys().filter(|b| !accesses[*b].is_empty()).collect();
        let range = |b: BufferId| {
            let buffer = &plan.buffers[b];
            buffer.offset..buffer.offset + buffer.bytes
        };
        let all_before = |a: BufferId, b: BufferId| {
            let pairs = accesses[a].iter().flat_map(|i| accesses[b].iter().map(move |j| (*i, *j)));
            pairs.into_iter().all(|(i, j)| order.before(i, j))
        };
        for (n, &a) in used.iter().enumerate() {
            for &b in &used[..n] {
                if range(a).start >= range(b).end || range(b).start >= range(a).end {
                    continue;
                }
                assert!(
                    all_before(a, b) || all_before(b, a),
                    "{model}: `{}` and `{}` share bytes and are not ordered",
                    plan.buffers[a].name,
                    plan.buffers[b].name
                );
                let stream = |b: BufferId| plan.tasks[accesses[b][0]].stream;
                shared_by_streams += usize::from(stream(a) != stream(b));
            }
        }
    }
    assert!(shared_by_streams > 20, "{shared_by_streams} pairs");
}

#[test]
fn bytes_are_reported_by_what_they_are_for() {
    let settings = ["sharding.ranks=4", "precision.compute=bf16"];
    let planned = crate::support::plan("tests/models/gpt2/model.onnx", 2, &settings);
    let plan = &planned.compiled.plan;
    let purposes = plan.purposes();
    for (buffer, purpose) in plan.buffers.iter().zip(&purposes) {
        assert!(buffer.arena == Arena::Workspace || purpose.is_none(), "{}", buffer.name);
    }
    let of = |task: &frit_ir::plan::Task| match &task.action {
        Action::AllGather { send, recv, .. } => Some((send.buffer, recv.buffer)),
        _ => None,
    };
    for (send, recv) in plan.tasks.iter().filter_map(of) {
        assert_eq!(purposes[recv], Some(Purpose::Gathered));
        assert!(matches!(purposes[send], None | Some(Purpose::Communication)));
    }
    // Live bytes are those of the tasks around, counted one buffer at a time.
    let (live, accesses) = (plan.live(), accesses(plan));
    for (i, live) in live.iter_enumerated().step_by(7) {
        let mut expected = [0; Purpose::ALL.len()];
        for (b, tasks) in accesses.iter_enumerated() {
            if let (Some(first), Some(last), Some(purpose)) =
                (tasks.first(), tasks.last(), purposes[b])
                && (first..=last).contains(&&i)
            {
                expected[purpose as usize] += plan.buffers[b].bytes.next_multiple_of(ALIGNMENT);
            }
        }
        assert_eq!(*live, expected, "at task {i}");
    }
    // Activations are what backward starts with; none is left in the update.
    let turn = plan.tasks.position(|t| t.region == Region::Backward).expect("a backward pass");
    let [gathered, _, activations, _] = live[turn];
    assert!(gathered > 0 && activations > 0);
    assert_eq!(live.last().expect("tasks")[Purpose::Activation as usize], 0);

    let path = planned.path();
    let args = ["frit", "inspect", path.to_str().unwrap(), "--view", "memory"];
    let text = execute(&Cli::try_parse_from(args).unwrap()).unwrap();
    for word in
        ["micro_step: forward", "micro_step: backward", "update", "gathered", "communication"]
    {
        assert!(text.contains(word), "{word} in\n{text}");
    }
}
