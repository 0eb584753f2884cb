//! Trains an observation-to-action TorchScript policy on trajectories of one's own: the pole on a cart.
//!
//! ```sh
//! cargo run --release --example step_policy [SEED]
//! ```
//!
//! A [`Source`] plays the game and hands the trajectories out; the [`Trainer`] does the rest: advantages,
//! the split of the gradients, the filter, the updates. The policy, `configs/train/cart_pole.pt`, knows
//! nothing at first; some 30 steps later the pole stands for the 200 that a trajectory may take.

use std::ops::ControlFlow;
use std::path::Path;

use gradprism::config::Config;
use gradprism::env::Seed;
use gradprism::objective::log_probs;
use gradprism::policy::Policy;
use gradprism::rollout::{Content, Group, Trajectory};
use gradprism::trainer::{
    Observer, Outcome, SampledGroup, Source, SourceRequest, StepRecord, Trainer,
};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use tch::{Kind, Tensor};

/// Steps of a trajectory at most.
const MOST_STEPS: usize = 200;

const CONFIG: &str = "
policy: {checkpoint: configs/train/cart_pole.pt, kind: step}
algorithm: {preset: grpo, aggregation: token_mean, kl: {coef: 0}, entropy_coef: 0.001}
training: {steps: 60, groups: 8, group_size: 8, epochs: 4}
filter: {strategy: top_p, value: 0.9, mini_batch_size: 2}
decomposition: {every: 20}
optimizer: {learning_rate: 0.003, weight_decay: 0}
threads: 1
";

fn main() -> anyhow::Result<()> {
    tch::set_num_threads(1);
    let seed = std::env::args().nth(1).unwrap_or("0".into());
    let overrides = [format!("training.seed={seed}")];
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = Config::parse(CONFIG, "step_policy", folder, &overrides)?;
    let trainer = Trainer::with_source(config, Box::new(CartPole), None)?;
    let report = trainer.run(&mut Printer)?;
    println!("{} updates in {:.1} s", report.updates, report.time.total);
    Ok(())
}

/// Prints a line every few steps.
struct Printer;

impl Observer for Printer {
    fn step(&mut self, record: &StepRecord) -> gradprism::Result<ControlFlow<()>> {
        if record.step.is_multiple_of(5) || record.step == 59 {
            print!(
                "step {:>2}: the pole stood for {:>5.1} steps; {} of {} groups kept",
                record.step, record.sampled.reward_mean, record.kept.groups, record.sampled.groups
            );
            let snr = record.split.and_then(|split| split.snr_mean);
            println!("{}", snr.map_or(String::new(), |snr| format!("; mean SNR {snr:.2}")));
        }
        Ok(ControlFlow::Continue(()))
    }

    fn warning(&mut self, message: &str) {
        eprintln!("{message}");
    }
}

/// A source: the trajectories of a group begin in one state.
struct CartPole;

impl Source for CartPole {
    fn observation_shape(&self) -> Option<Vec<i64>> {
        Some(vec![4])
    }

    fn sample(
        &mut self,
        policy: &Policy,
        request: &SourceRequest,
    ) -> gradprism::Result<Vec<SampledGroup>> {
        let mut walks: Vec<Walk> = Vec::new();
        for visit in &request.visits {
            for trajectory in 0..request.group_size as u64 {
                walks.push(Walk::start(Seed { task: visit.task, visit: visit.visit, trajectory }));
            }
        }
        let _no_grad = tch::no_grad_guard();
        loop {
            let running: Vec<&mut Walk> = walks.iter_mut().filter(|walk| !walk.is_over()).collect();
            if running.is_empty() {
                break;
            }
            let states: Vec<f64> = running.iter().flat_map(|walk| walk.state.0).collect();
            let states = Tensor::from_slice(&states).reshape([-1, 4]).to_kind(policy.dtype());
            let logp = log_probs(&policy.step_logits(&states)?, 1.0).to_kind(Kind::Double);
            let logp: Vec<f64> = Vec::try_from(logp.reshape([-1]))?;
            for (walk, logp) in running.into_iter().zip(logp.chunks(2)) {
                walk.step(logp);
            }
        }
        let mut walks = walks.into_iter();
        let groups = request.visits.iter().map(|visit| {
            let trajectories: Vec<Trajectory> =
                walks.by_ref().take(request.group_size).map(Walk::finish).collect();
            let outcome = |row: &Trajectory| Outcome {
                success: Some(row.content.len() == MOST_STEPS),
                turns: row.content.len(),
                ..Outcome::default()
            };
            let outcomes = trajectories.iter().map(outcome).collect();
            SampledGroup { group: Group { id: visit.visit.to_string(), trajectories }, outcomes }
        });
        Ok(groups.collect())
    }
}

/// A trajectory in the making.
struct Walk {
    state: State,
    random: ChaCha8Rng,
    observations: Vec<f64>,
    actions: Vec<i64>,
    logprobs: Vec<f64>,
}

impl Walk {
    fn start(seed: Seed) -> Self {
        let mut task = seed.task_generator();
        Self {
            state: State(std::array::from_fn(|_| task.random_range(-0.05..0.05))),
            random: seed.sampling_generator(),
            observations: Vec::new(),
            actions: Vec::new(),
            logprobs: Vec::new(),
        }
    }

    fn is_over(&self) -> bool {
        self.state.has_fallen() || self.actions.len() == MOST_STEPS
    }

    /// Draws an action from the log-probabilities of left and right, and takes it.
    fn step(&mut self, logp: &[f64]) {
        let action = usize::from(self.random.random::<f64>() >= logp[0].exp());
        self.observations.extend(self.state.0);
        self.actions.push(action as i64);
        self.logprobs.push(logp[action]);
        self.state = self.state.pushed(if action == 1 { 10.0 } else { -10.0 });
    }

    fn finish(self) -> Trajectory {
        Trajectory {
            line: 0,
            id: None,
            mask: vec![true; self.actions.len()],
            reward: self.actions.len() as f64,
            content: Content::Steps {
                observations: self.observations,
                shape: vec![4],
                actions: self.actions,
            },
            token_rewards: None,
            old_logprobs: Some(self.logprobs),
            ref_logprobs: None,
            sampler_logprobs: None,
            values: None,
            reasoning: None,
        }
    }
}

/// Place and speed of the cart, angle and speed of the pole.
#[derive(Clone, Copy)]
struct State([f64; 4]);

impl State {
    /// After a fiftieth of a second under a force, with the equations and constants of gymnasium's
    /// CartPole-v1: a cart of 1 kg, a pole of 0.1 kg and half a metre from its middle to an end.
    fn pushed(self, force: f64) -> Self {
        const POLE: f64 = 0.1;
        const TOTAL: f64 = 1.0 + POLE;
        const HALF: f64 = 0.5;
        const TIME: f64 = 0.02;
        let [x, speed, angle, turn] = self.0;
        let (sine, cosine) = angle.sin_cos();
        let push = (force + POLE * HALF * turn * turn * sine) / TOTAL;
        let turning =
            (9.8 * sine - cosine * push) / (HALF * (4.0 / 3.0 - POLE * cosine * cosine / TOTAL));
        let pushing = push - POLE * HALF * turning * cosine / TOTAL;
        Self([x + TIME * speed, speed + TIME * pushing, angle + TIME * turn, turn + TIME * turning])
    }

    fn has_fallen(self) -> bool {
        self.0[0].abs() > 2.4 || self.0[2].abs() > 12_f64.to_radians()
    }
}
