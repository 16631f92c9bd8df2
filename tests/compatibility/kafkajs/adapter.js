// kafkajs for the client matrix: requests as JSON lines, as tests/compatibility/clients/speaking.py describes them.
'use strict'

const readline = require('node:readline')
const { CompressionCodecs, CompressionTypes, Kafka, Partitioners, logLevel } = require('kafkajs')
const snappy = require('kafkajs-snappy')
const lz4 = require('lz4-napi')
const { ZstdCodec } = require('zstd-codec')

const CODECS = {
  none: CompressionTypes.None,
  gzip: CompressionTypes.GZIP,
  snappy: CompressionTypes.Snappy,
  lz4: CompressionTypes.LZ4,
  zstd: CompressionTypes.ZSTD,
}
const ACKS = { 0: 0, 1: 1, all: -1 }
const WAIT_MS = 30000

const zstd = new Promise((resolve) => ZstdCodec.run((codec) => resolve(new codec.Streaming())))
CompressionCodecs[CompressionTypes.Snappy] = snappy
CompressionCodecs[CompressionTypes.LZ4] = () => ({
  compress: async (encoder) => lz4.compressFrame(encoder.buffer),
  decompress: async (buffer) => lz4.decompressFrame(buffer),
})
CompressionCodecs[CompressionTypes.ZSTD] = () => ({
  compress: async (encoder) => Buffer.from((await zstd).compress(encoder.buffer)),
  decompress: async (buffer) => Buffer.from((await zstd).decompress(buffer)),
})

const kafka = new Kafka({
  clientId: 'kafkajs',
  brokers: process.argv[2].split(','),
  logLevel: logLevel.NOTHING,
  retry: { initialRetryTime: 50, maxRetryTime: 1000, retries: 10 },
})
const admin = kafka.admin()
const members = new Map()

const toBytes = (text) => (text === null ? null : Buffer.from(text, 'base64'))
const toText = (data) => (data === null || data === undefined ? null : Buffer.from(data).toString('base64'))
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms))

// Headers of one name are an array here.
function headersIn(pairs) {
  const headers = {}
  for (const [name, data] of pairs) {
    headers[name] = name in headers ? [headers[name], toBytes(data)].flat() : toBytes(data)
  }
  return headers
}

function headersOut(headers) {
  return Object.entries(headers ?? {}).flatMap(([name, data]) => [data].flat().map((one) => [name, toText(one)]))
}

function recordOut({ partition, message }) {
  return {
    partition,
    offset: Number(message.offset),
    timestamp: Number(message.timestamp),
    key: toText(message.key),
    value: toText(message.value),
    headers: headersOut(message.headers),
  }
}

async function startMember(group, topic, onRecord) {
  const consumer = kafka.consumer({ groupId: group, sessionTimeout: 10000, heartbeatInterval: 200, maxWaitTimeInMs: 100 })
  const member = { consumer, assigned: [], got: [] }
  consumer.on(consumer.events.GROUP_JOIN, ({ payload }) => {
    member.assigned = (payload.memberAssignment[topic] ?? []).slice().sort((a, b) => a - b)
  })
  await consumer.connect()
  await consumer.subscribe({ topics: [topic], fromBeginning: true })
  await consumer.run({
    autoCommit: false,
    eachMessage: async (one) => {
      member.got.push([one.partition, Number(one.message.offset)])
      if (onRecord) onRecord(one)
    },
  })
  return member
}

async function endMember(member) {
  await member.consumer.stop()
  await member.consumer.disconnect()
}

const operations = {
  version: async () => require('kafkajs/package.json').version,

  async produce({ topic, codec, records, acks, idempotent }) {
    const producer = kafka.producer({ idempotent, createPartitioner: Partitioners.DefaultPartitioner })
    await producer.connect()
    try {
      const messages = records.map((record) => ({
        key: toBytes(record.key),
        value: toBytes(record.value),
        headers: headersIn(record.headers),
        timestamp: String(record.timestamp),
        partition: record.partition,
      }))
      const sent = await producer.send({ topic, acks: ACKS[acks], compression: CODECS[codec], messages })
      const first = sent.length === 1 ? Number(sent[0].baseOffset ?? -1) : -1
      return records.map((_, number) => (first < 0 ? -1 : first + number))
    } finally {
      await producer.disconnect()
    }
  },

  // Transactions one after the other, each with a record in two partitions; every second one is aborted. Offsets of the
  // group are sent with each: its number and one. Returns the error of a producer that another one has fenced.
  async transact({ topic, group, rounds }) {
    const options = { idempotent: true, maxInFlightRequests: 1, transactionalId: topic }
    const [old, producer] = [kafka.producer(options), kafka.producer(options)]
    const send = (transaction, value) =>
      transaction.send({ topic, messages: [0, 1].map((partition) => ({ partition, value: `${value}-${partition}` })) })
    try {
      await old.connect()
      await (await old.transaction()).abort() // it asks for its producer id now
      await producer.connect()
      for (let round = 0; round < rounds; round += 1) {
        const transaction = await producer.transaction()
        await send(transaction, round)
        const topics = [{ topic, partitions: [{ partition: 0, offset: String(round + 1) }] }]
        await transaction.sendOffsets({ consumerGroupId: group, topics })
        await (round % 2 ? transaction.abort() : transaction.commit())
      }
      return await old
        .transaction()
        .then((transaction) => send(transaction, 'fenced'))
        .then(() => 'not fenced', (error) => error.type ?? error.cause?.type ?? error.message)
    } finally {
      await producer.disconnect()
      await old.disconnect()
    }
  },

  // It reads as a member of a group or not at all.
  async read({ topic, count }) {
    const found = []
    const group = `kafkajs-reading-${topic}-${Date.now()}`
    const member = await startMember(group, topic, (one) => found.push(recordOut(one)))
    try {
      const deadline = Date.now() + WAIT_MS
      while (found.length < count && Date.now() < deadline) await sleep(5)
      return found.slice(0, count)
    } finally {
      await endMember(member)
    }
  },

  async join({ member, group, topic }) {
    members.set(member, await startMember(group, topic))
  },
  async member({ member }) {
    const { assigned, got } = members.get(member)
    return { assigned, got }
  },
  async leave({ member }) {
    const leaving = members.get(member)
    members.delete(member)
    await endMember(leaving)
  },

  // Only a member commits.
  async commit({ group, topic, offsets }) {
    const member = await startMember(group, topic)
    try {
      await member.consumer.commitOffsets(
        Object.entries(offsets).map(([index, offset]) => ({ topic, partition: Number(index), offset: String(offset) })),
      )
    } finally {
      await endMember(member)
    }
  },
  async committed({ group, topic }) {
    const [found] = await admin.fetchOffsets({ groupId: group, topics: [topic] })
    return Object.fromEntries(found.partitions.map(({ partition, offset }) => [partition, Number(offset)]))
  },

  async create_topic({ topic, partitions, replicas, configs }) {
    const configEntries = Object.entries(configs).map(([name, value]) => ({ name, value }))
    const topics = [{ topic, numPartitions: partitions, replicationFactor: replicas, configEntries }]
    if (!(await admin.createTopics({ topics }))) throw new Error(`${topic} exists`)
  },
  topics: async () => (await admin.listTopics()).sort(),
  async partitions({ topic }) {
    return (await admin.fetchTopicMetadata({ topics: [topic] })).topics[0].partitions.length
  },
  add_partitions: async ({ topic, total }) => {
    await admin.createPartitions({ topicPartitions: [{ topic, count: total }] })
  },
  delete_topic: async ({ topic }) => {
    await admin.deleteTopics({ topics: [topic] })
  },
  async config({ topic, name }) {
    const found = await admin.describeConfigs({ includeSynonyms: false, resources: [{ type: 2, name: topic }] })
    return found.resources[0].configEntries.find((entry) => entry.configName === name).configValue
  },
  set_config: async ({ topic, name, value }) => {
    const resources = [{ type: 2, name: topic, configEntries: [{ name, value }] }]
    await admin.alterConfigs({ validateOnly: false, resources })
  },
  brokers: async () => (await admin.describeCluster()).brokers.length,
  start_offset: async ({ topic }) => Number((await admin.fetchTopicOffsets(topic))[0].low),
  end_offset: async ({ topic }) => Number((await admin.fetchTopicOffsets(topic))[0].high),
  delete_records: async ({ topic, before }) => {
    // It knows the leaders of topics it was asked about before.
    await admin.fetchTopicOffsets(topic)
    await admin.deleteTopicRecords({ topic, partitions: [{ partition: 0, offset: String(before) }] })
  },
  groups: async () => (await admin.listGroups()).groups.map(({ groupId }) => groupId).sort(),
  async group({ group }) {
    const [found] = (await admin.describeGroups([group])).groups
    return { state: found.state, members: found.members.length }
  },
  async group_offsets({ group }) {
    const found = {}
    for (const { topic, partitions } of await admin.fetchOffsets({ groupId: group })) {
      found[topic] = Object.fromEntries(partitions.map(({ partition, offset }) => [partition, Number(offset)]))
    }
    return found
  },
  set_group_offset: async ({ group, topic, offset }) => {
    await admin.setOffsets({ groupId: group, topic, partitions: [{ partition: 0, offset: String(offset) }] })
  },
  delete_group: async ({ group }) => {
    await admin.deleteGroups([group])
  },
}

async function main() {
  await admin.connect()
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const request = JSON.parse(line)
    let answer
    try {
      answer = { ok: (await operations[request.do](request)) ?? null }
    } catch (error) {
      console.error(error)
      answer = { failed: `${error.name}: ${error.message}` }
    }
    process.stdout.write(JSON.stringify(answer) + '\n')
  }
  await Promise.all([...members.values()].map(endMember))
  await admin.disconnect()
  process.exit(0)
}

main()
