//! Times the parts: `cargo bench`. Against other ways of doing the whole, see `reference.py`.

use std::hint::black_box;
use std::ops::ControlFlow;
use std::path::Path;

use criterion::{Criterion, criterion_group, criterion_main};
use gradprism::filter::Filter;
use gradprism::gradient::{
    BatchedEngine, Coefficients, Components, Engine, Gram, GroupInput, GroupProducts, Part,
    PlainEngine, Scorer, split,
};
use gradprism::objective::{self, Algorithm, Preset};
use gradprism::policy::{Policy, PolicyKind, PolicyOptions};
use gradprism::rollout::{self, OnProblem, ReadOptions};
use gradprism::study::PreparedBatch;
use tch::{Device, Kind, Tensor};

/// The quickstart's groups by each engine, four at once.
fn engines(criterion: &mut Criterion) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/quickstart");
    let policy = Policy::load(&folder.join("policy.pt"), &PolicyOptions::default()).unwrap();
    let options = ReadOptions {
        kind: PolicyKind::CausalLm,
        tokenizer: None,
        single: OnProblem::Error,
        missing_reward: OnProblem::Error,
    };
    let rollouts = rollout::read(&folder.join("rollouts.jsonl"), &options).unwrap();
    let algorithm = Algorithm { entropy_coef: 0.01, ..Preset::Grpo.algorithm() };
    let prepared = PreparedBatch::new(&algorithm, &rollouts.batches[0]).unwrap();
    let inputs: Vec<GroupInput> = (0..4)
        .map(|group| prepared.group_input(&algorithm, &rollouts.batches[0], group).unwrap())
        .collect();
    let batched = |sketch| BatchedEngine::new(PlainEngine::default(), 8192, true, 0, sketch);
    let ways: [(&str, Box<dyn Engine>, Components); 4] = [
        ("loop", Box::new(PlainEngine::default()), Components::Separate),
        ("batched", Box::new(batched(None)), Components::Separate),
        ("combined", Box::new(batched(None)), Components::Combined),
        ("sketch", Box::new(batched(Some(64))), Components::Separate),
    ];
    let mut group = criterion.benchmark_group("engine");
    group.sample_size(10);
    for (name, mut engine, components) in ways {
        let scorer = Scorer {
            policy: &policy,
            reference: None,
            algorithm: &algorithm,
            temperature: 1.0,
            recompute_old: false,
            components,
        };
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let mut tick = || ControlFlow::Continue(());
                black_box(engine.groups(&scorer, &inputs, &mut tick).unwrap())
            });
        });
    }
    group.finish();
}

/// What follows from a group's inner products, its test of no signal included.
fn splits(criterion: &mut Criterion) {
    let coefficients = Coefficients { kl: 0.001, entropy: 0.001 };
    for rows in [8, 64] {
        let n = rows as i64 + 2;
        let vectors = Tensor::randn([n, 1000], (Kind::Double, Device::Cpu));
        let gram = Vec::try_from(vectors.mm(&vectors.tr()).reshape([-1])).unwrap();
        let parts = vec![Part::Kl, Part::Entropy];
        let products = GroupProducts::exact(rows, parts, Gram::from_products(gram));
        criterion.bench_function(&format!("split/{rows}"), |bencher| {
            bencher.iter(|| black_box(split(&products, coefficients, None, 0)));
        });
    }
}

/// The closed form of a loss's gradient with respect to logits `[512, 32768]`.
fn logit_gradients(criterion: &mut Criterion) {
    let options = (Kind::Float, Device::Cpu);
    let log_probs = objective::log_probs(&Tensor::randn([512, 32768], options), 1.0);
    let actions = Tensor::randint(32768, [512], (Kind::Int64, Device::Cpu));
    let slope = Tensor::randn([512], options);
    let mut group = criterion.benchmark_group("logit_gradient");
    group.sample_size(10);
    for (name, entropy) in [("task", None), ("task and entropy", Some(&slope))] {
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                objective::logit_gradient(&log_probs, &actions, &slope, entropy, 1.0).unwrap()
            });
        });
    }
    group.finish();
}

/// A filter of a million groups beside a bare sort of their scores.
fn filters(criterion: &mut Criterion) {
    let scores = Tensor::rand([1_000_000], (Kind::Double, Device::Cpu));
    let filter = Filter::default();
    let mut group = criterion.benchmark_group("filter");
    group.sample_size(10);
    group.bench_function("sort", |bencher| bencher.iter(|| black_box(scores.sort(0, true))));
    group.bench_function("top_p", |bencher| {
        bencher.iter(|| black_box(filter.select(&scores).unwrap()));
    });
    group.finish();
}

criterion_group!(parts, engines, splits, logit_gradients, filters);
criterion_main!(parts);
