//! A plain `tch` training loop, and what gradprism adds to it.
//!
//! ```sh
//! cargo run --example drop_in
//! ```
//!
//! The loop is an ordinary one: a small network reads a context and chooses one of eight actions, eight
//! times a context, and is rewarded. A third of the contexts are hopeless (the reward is always 0), a
//! third pay at random, and a third pay for the right action: only there is something to be learned.
//! What lies between the lines `gradprism {` and `} gradprism` is all that was added: the objective with
//! its advantages, the split of every context's gradient into signal and noise, and a filter that
//! keeps the groups with the highest signal-to-noise ratio. All of it works on tensors of the loop's own.

use std::collections::BTreeMap;

use gradprism::filter::{Filter, Strategy};
use gradprism::gradient::{Coefficients, GradientVector, GroupProducts, mean, split};
use gradprism::objective::{GroupIndex, Preset, TokenWeights, Tokens, gather, log_probs};
use gradprism::trainer::{AdamW, AdamWOptions, Optimizer, Schedule};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

const CONTEXTS: i64 = 12;
const SAMPLES: i64 = 8;
const ACTIONS: i64 = 8;
const STEPS: usize = 61;

fn main() -> anyhow::Result<()> {
    tch::manual_seed(0);
    tch::set_num_threads(1);
    let weights = nn::VarStore::new(Device::Cpu);
    let root = weights.root();
    let network = nn::seq()
        .add(nn::linear(&root / "in", CONTEXTS, 32, Default::default()))
        .add_fn(Tensor::tanh)
        .add(nn::linear(&root / "out", 32, ACTIONS, Default::default()));
    // Sorted, so that sums over them round the same way every time.
    let named: BTreeMap<String, Tensor> = weights.variables().into_iter().collect();
    let parameters: Vec<Tensor> = named.values().map(Tensor::shallow_clone).collect();

    // gradprism {
    let algorithm = Preset::Rloo.algorithm();
    let options = AdamWOptions { learning_rate: 0.01, weight_decay: 0.0, ..Default::default() };
    let mut optimizer =
        Optimizer::new(AdamW::new(options, named)?, Schedule::default(), Some(1.0), 3)?;
    // } gradprism

    println!(
        "step   reward of the learnable   mean SNR: hopeless  random  learnable   kept of each"
    );
    for step in 0..STEPS {
        // The loop's own: contexts, actions, rewards.
        let labels: Vec<i64> = (0..CONTEXTS).flat_map(|it| [it; SAMPLES as usize]).collect();
        let contexts = Tensor::from_slice(&labels).one_hot(CONTEXTS).to_kind(Kind::Float);
        let logits = network.forward(&contexts);
        let actions = logits.detach().softmax(-1, Kind::Float).multinomial(1, true).squeeze_dim(1);
        let rewards = rewards(&labels, &actions)?;

        // gradprism {
        let log_probs = log_probs(&logits, 1.0);
        let logp = gather(&log_probs, &actions)?.unsqueeze(1); // [B, 1]: a response of one token
        let groups = GroupIndex::new(&labels, &rewards);
        let tokens = Tokens {
            old_logp: logp.detach(),
            ref_logp: None,
            sampler_logp: None,
            advantages: groups.rloo(&rewards).unsqueeze(1),
            mask: logp.ones_like(),
            logp,
        };
        let term = algorithm.task(&tokens).attach(&tokens.logp); // [B, 1], differentiable
        let snrs =
            (0..CONTEXTS).map(|it| snr(&term, it, &parameters)).collect::<Result<Vec<_>, _>>()?;
        let kept = keep_best(&snrs, CONTEXTS as usize / 3)?;
        let mask: Vec<bool> = labels.iter().map(|label| kept[*label as usize]).collect();
        let mask = Tensor::from_slice(&mask).unsqueeze(1);
        let loss = TokenWeights::new(algorithm.aggregation, None, &mask)?.sum(&term)?;
        optimizer.backward(&loss)?;
        optimizer.step()?;
        // } gradprism

        if step % 10 == 0 {
            let third = CONTEXTS as usize / 3;
            let of = |part: usize| mean(&snrs[part * third..][..third]).unwrap_or(0.0);
            let count =
                |part: usize| kept[part * third..][..third].iter().filter(|it| **it).count();
            let reward = rewards.narrow(0, 2 * (third as i64) * SAMPLES, third as i64 * SAMPLES);
            println!(
                "{step:>4}   {:>23.2}   {:>18.2}  {:>6.2}  {:>9.2}   {:>2} {:>2} {:>2}",
                reward.mean(Kind::Float).double_value(&[]),
                of(0),
                of(1),
                of(2),
                count(0),
                count(1),
                count(2)
            );
        }
    }
    Ok(())
}

/// The signal-to-noise ratio of a context, from the gradients of its rows.
fn snr(term: &Tensor, context: i64, parameters: &[Tensor]) -> anyhow::Result<f64> {
    let rows = (0..SAMPLES).map(|row| term.get(context * SAMPLES + row).sum(Kind::Float) / SAMPLES);
    let gradients: Vec<GradientVector> = rows
        .map(|row| Tensor::f_run_backward(&[row], parameters, true, false))
        .collect::<Result<_, _>>()?;
    let products = GroupProducts::of_rows(&gradients)?;
    Ok(split(&products, Coefficients { kl: 0.0, entropy: 0.0 }, None, 0).snr)
}

/// The contexts of the highest ratios.
fn keep_best(snrs: &[f64], count: usize) -> gradprism::Result<Vec<bool>> {
    let filter = Filter { strategy: Strategy::TopKAbs, value: count as f64, ..Filter::default() };
    filter.select(&Tensor::from_slice(snrs))?.to_host()
}

/// 0 for the first third of the contexts, chance for the second, and for the last 1 for one action.
fn rewards(labels: &[i64], actions: &Tensor) -> anyhow::Result<Tensor> {
    let actions: Vec<i64> = Vec::try_from(actions)?;
    let luck = Tensor::rand([labels.len() as i64], (Kind::Float, Device::Cpu));
    let luck: Vec<f32> = Vec::try_from(luck)?;
    let reward = |(row, label): (usize, &i64)| match label / (CONTEXTS / 3) {
        0 => 0.0,
        1 => f32::from(u8::from(luck[row] < 0.5)),
        _ => f32::from(u8::from(actions[row] == label % ACTIONS)),
    };
    Ok(Tensor::from_slice(&labels.iter().enumerate().map(reward).collect::<Vec<f32>>()))
}
